#include "tests/checkpoint/saved.h"

namespace trireme::checkpoint::testing {

void write_rank(const Folder& folder, const Layout& layout, int64_t rank, int64_t step, int64_t generation) {
  ShardSpec spec{.rank = rank,
                 .step = step,
                 .generation = generation,
                 .pieces = written_by(layout, rank),
                 .metadata = {{"tied", "embedding"}},
                 .state = fmt::format(R"({{"random":"{}"}})", rank * 11)};
  std::string bytes;
  write_shard(folder, spec, [&](size_t piece) {
    bytes = bytes_of(spec.pieces[piece]);
    return bytes.data();
  });
}

std::string save(Store& store, const Layout& layout, int64_t step, int64_t attempt) {
  const std::string temporary = temporary_name(step, store.generation(), attempt);
  const Folder folder = store.begin(temporary);
  for (int64_t rank = 0; rank < layout.ranks(); ++rank)
    write_rank(folder, layout, rank, step, store.generation());
  return store.commit({.temporary = temporary,
                       .step = step,
                       .ranks = layout.ranks(),
                       .state = fmt::format(R"({{"step":{}}})", step)});
}

std::string read_error(const Checkpoint& checkpoint, const Layout& layout, int64_t rank) {
  for (const PieceSpec& piece : held_by(layout, rank)) {
    const std::string expected = bytes_of(piece);
    std::string bytes(expected.size(), '?');
    checkpoint.read(piece.tensor, piece.region, bytes.data());
    if (bytes != expected) return fmt::format("rank {}: {} differs", rank, piece.tensor);
  }
  return {};
}

}  // namespace trireme::checkpoint::testing
