#include <gtest/gtest.h>

#include "tests/checkpoint/saved.h"
#include "trireme/base/error.h"

namespace trireme::checkpoint::testing {
namespace {

/// Every layout with up to eight ranks reads what every other one has written, byte for byte.
/// Whatever the layout, what its ranks write covers the model.
TEST(Reshard, EveryLayoutWritesEveryElementOnce) {
  for (const testing::Layout& layout : testing::layouts(8)) {
    for (const testing::ModelTensor& tensor : testing::model()) {
      std::vector<PieceSpec> pieces;
      for (int64_t rank = 0; rank < layout.ranks(); ++rank) {
        for (PieceSpec& piece : testing::written_by(layout, rank)) {
          if (piece.tensor == tensor.name) pieces.push_back(std::move(piece));
        }
      }
      std::vector<const plan::Region*> regions;
      for (const PieceSpec& piece : pieces) regions.push_back(&piece.region);
      ASSERT_EQ(plan::coverage_error(tensor.shape, regions), "") << layout.name() << " " << tensor.name;
    }
  }
}

TEST(Reshard, AllOrderedPairsOfLayoutsReadEveryByte) {
  const Scratch scratch;
  const std::vector<Layout> all = layouts(8);
  EXPECT_GE(all.size(), 40u);
  Store store(scratch.path("checkpoints"));
  for (const Layout& from : all) {
    const Checkpoint checkpoint(store.folder().path_of(save(store, from, 1)));
    for (const Layout& to : all) {
      for (int64_t rank = 0; rank < to.ranks(); ++rank)
        ASSERT_EQ(read_error(checkpoint, to, rank), "") << from.name() << " -> " << to.name();
    }
  }
}

TEST(Reshard, AReaderOpensOnlyTheFilesThatItNeeds) {
  const Scratch scratch;
  const Layout layout{.replicas = 1, .shards = 4, .stages = 1, .tensor = 1};
  Store store(scratch.path("checkpoints"));
  const std::string name = save(store, layout, 1);
  const Checkpoint checkpoint(store.folder().path_of(name));
  for (const int64_t other : {1, 2, 3})
    std::filesystem::remove(scratch.path(fmt::format("checkpoints/{}/shard-{:05}.safetensors", name, other)));
  EXPECT_EQ(read_error(checkpoint, layout, 0), "");
  EXPECT_THROW(read_error(checkpoint, layout, 1), DataError);
}

/// Pieces of more than a chunk, read by ranges that begin and end within chunks.
TEST(Reshard, LargePiecesAreReadByTheChunksThatAreNeeded) {
  const Scratch scratch;
  constexpr int64_t kNumel = 3 * kChunkBytes / 4 + 1000;
  std::vector<uint32_t> values(kNumel);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint32_t>(i * 2654435761u);
  const plan::Shape shape = {kNumel};
  Store store(scratch.path("checkpoints"));
  const std::string temporary = temporary_name(1, store.generation(), 1);
  write_shard(store.begin(temporary),
              {.rank = 0,
               .step = 1,
               .generation = store.generation(),
               .pieces = {{"x", "F32", shape, plan::Region::whole(shape)}},
               .metadata = {},
               .state = {}},
              [&](size_t) { return values.data(); });
  const std::string name = store.commit({.temporary = temporary, .step = 1, .ranks = 1, .state = "{}"});
  const Checkpoint checkpoint(store.folder().path_of(name));
  ASSERT_EQ(checkpoint.tensor("x").pieces.front().digests.size(), 4u);
  const int64_t chunk = kChunkBytes / 4;
  for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{{0, kNumel},
                                                                           {0, chunk},
                                                                           {5, 9},
                                                                           {chunk - 1, chunk + 1},
                                                                           {chunk - 7, 3 * chunk + 7},
                                                                           {chunk, 2 * chunk},
                                                                           {kNumel - 1, kNumel},
                                                                           {9, 9}}) {
    std::vector<uint32_t> read(static_cast<size_t>(end - begin));
    checkpoint.read("x", plan::Region::flat(shape, {begin, end}), read.data());
    EXPECT_TRUE(std::equal(read.begin(), read.end(), values.begin() + begin)) << begin << " " << end;
  }
  const std::string file = scratch.path(fmt::format("checkpoints/{}/shard-00000.safetensors", name));
  std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
  damaged.seekp(checkpoint.tensor("x").pieces.front().offset + kChunkBytes + 77);
  damaged.put('!');
  damaged.close();
  std::vector<uint32_t> read(static_cast<size_t>(kNumel));
  checkpoint.read("x", plan::Region::flat(shape, {0, chunk}), read.data());
  checkpoint.read("x", plan::Region::flat(shape, {2 * chunk, kNumel}), read.data());
  EXPECT_THROW(checkpoint.read("x", plan::Region::flat(shape, {chunk + 5, chunk + 6}), read.data()),
               DataError);
  EXPECT_EQ(checkpoint.verify().size(), 1u);
}

}  // namespace
}  // namespace trireme::checkpoint::testing
