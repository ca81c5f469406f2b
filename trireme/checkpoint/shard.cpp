#include "trireme/checkpoint/shard.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <thread>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::checkpoint {
namespace {

constexpr const char* kStatePrefix = "rank_state.";
constexpr auto kPollEvery = std::chrono::milliseconds(5);

std::string shard_name(int64_t rank) {
  return fmt::format("shard-{:05}.safetensors", rank);
}
std::string report_name(int64_t rank) {
  return fmt::format("report-{:05}.json", rank);
}
std::string failure_name(int64_t rank) {
  return fmt::format("failed-{:05}.txt", rank);
}

/// Wide elements first, so that each piece starts at a multiple of its element's size.
std::vector<size_t> file_order(const std::vector<PieceSpec>& pieces) {
  std::vector<size_t> order;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const bool of_nothing = std::ranges::find(pieces[i].shape, 0) != pieces[i].shape.end();
    if (pieces[i].region.numel() > 0 || of_nothing) order.push_back(i);
  }
  std::ranges::stable_sort(order, {}, [&](size_t i) {
    return std::pair(-safetensors_itemsize(pieces[i].dtype), pieces[i].tensor);
  });
  return order;
}

/// A piece that is a box keeps its shape for whoever opens the file with other tools.
plan::Shape entry_shape(const plan::Region& region) {
  const plan::Region box = plan::Region::box(region.start, region.extent);
  return region == box ? region.extent : plan::Shape{region.numel()};
}

void check_piece(const PieceSpec& piece) {
  TRIREME_CHECK(safetensors_itemsize(piece.dtype) > 0 && plan::checked_numel(piece.shape),
                "[checkpoint.shard] tensor '{}' of {} [{}] cannot be stored", piece.tensor, piece.dtype,
                fmt::join(piece.shape, ", "));
  TRIREME_CHECK(plan::misfit(piece.region, piece.shape).empty(), "[checkpoint.shard] tensor '{}': {}",
                piece.tensor, plan::misfit(piece.region, piece.shape));
}

/// The pieces with their places in the file, and the header that says the same.
struct Placed {
  std::vector<size_t> order;
  std::vector<StoredPiece> pieces;  ///< in that order; offsets from the end of the header
  SafetensorsHeader header;
  int64_t data_bytes = 0;
};

Placed place(const ShardSpec& spec) {
  Placed placed{.order = file_order(spec.pieces), .pieces = {}, .header = {}};
  placed.header.metadata = {{"format", "pt"}, {std::string(kPieceOf), fmt::format("step {}", spec.step)}};
  for (const size_t i : placed.order) {
    const PieceSpec& piece = spec.pieces[i];
    check_piece(piece);
    std::string entry = piece.tensor;
    for (int64_t more = 1; placed.header.tensors.contains(entry) || entry == "__metadata__"; ++more)
      entry = fmt::format("{}@{}", piece.tensor, more);
    const int64_t bytes = piece.region.numel() * safetensors_itemsize(piece.dtype);
    placed.header.tensors[entry] = {.dtype = piece.dtype,
                                    .shape = entry_shape(piece.region),
                                    .begin = placed.data_bytes,
                                    .end = placed.data_bytes + bytes};
    placed.pieces.push_back(
        {.file = 0, .entry = entry, .offset = placed.data_bytes, .region = piece.region, .digests = {}});
    placed.data_bytes += bytes;
  }
  return placed;
}

/// Writes chunk by chunk, and takes the digest of each while it is in the cache.
std::vector<uint64_t> append_with_digests(OutputFile& file, const void* data, int64_t bytes) {
  std::vector<uint64_t> digests;
  const auto* next = static_cast<const char*>(data);
  for (int64_t done = 0; done < bytes; done += kChunkBytes) {
    const int64_t count = std::min(kChunkBytes, bytes - done);
    digests.push_back(xxh3(next + done, static_cast<size_t>(count)));
    file.append(next + done, count);
  }
  return digests;
}

}  // namespace

void write_shard(const Folder& folder, const ShardSpec& spec, const PieceSource& source) {
  Placed placed = place(spec);
  const std::string preamble = safetensors_preamble(placed.header);
  const auto header_bytes = static_cast<int64_t>(preamble.size());
  OutputFile file = folder.create_file(shard_name(spec.rank));
  file.reserve(header_bytes + placed.data_bytes);
  file.append(preamble.data(), header_bytes);
  Index report{.step = spec.step,
               .generation = spec.generation,
               .files = {},
               .tensors = {},
               .metadata = spec.metadata,
               .state = {}};
  for (size_t i = 0; i < placed.order.size(); ++i) {
    const PieceSpec& piece = spec.pieces[placed.order[i]];
    StoredPiece& stored = placed.pieces[i];
    const HeaderEntry& entry = placed.header.tensors.at(stored.entry);
    stored.offset += header_bytes;
    if (entry.end > entry.begin)
      stored.digests = append_with_digests(file, source(placed.order[i]), entry.end - entry.begin);
    StoredTensor& tensor =
        report.tensors.try_emplace(piece.tensor, StoredTensor{piece.dtype, piece.shape, {}}).first->second;
    TRIREME_CHECK(tensor.dtype == piece.dtype && tensor.shape == piece.shape,
                  "[checkpoint.shard] two pieces of tensor '{}' are {} [{}] and {} [{}]", piece.tensor,
                  tensor.dtype, fmt::join(tensor.shape, ", "), piece.dtype, fmt::join(piece.shape, ", "));
    tensor.pieces.push_back(std::move(stored));
  }
  report.files.push_back({.name = shard_name(spec.rank),
                          .bytes = file.size(),
                          .header_bytes = header_bytes,
                          .header_digest = xxh3(preamble)});
  file.finish();
  if (!spec.state.empty()) report.metadata.emplace(fmt::format("{}{}", kStatePrefix, spec.rank), spec.state);
  folder.write_file(report_name(spec.rank), format_index(report));
}

void report_failure(const std::string& folder, int64_t rank, const std::string& reason) noexcept {
  try {
    const Folder inside(folder);
    try {
      inside.write_file(failure_name(rank), reason);
    } catch (const EnvironmentError&) {
      inside.create_file(failure_name(rank));  // a full disk may have room for a name
    }
  } catch (const std::exception&) {  // the one who waits hears of it by its deadline
  }
}

Reports collect_reports(const Folder& folder, int64_t step, int64_t generation, int64_t ranks, double seconds,
                        const std::function<bool()>& cancelled) {
  Reports reports;
  reports.index.step = step;
  reports.index.generation = generation;
  std::vector<int64_t> missing(static_cast<size_t>(ranks));
  std::iota(missing.begin(), missing.end(), 0);
  const double deadline = monotonic_seconds() + seconds;
  for (;;) {
    std::erase_if(missing, [&](int64_t rank) {
      if (folder.has(failure_name(rank))) {
        const std::string reason = folder.open_file(failure_name(rank)).text(int64_t{1} << 16);
        throw EnvironmentError("[checkpoint.shard] rank {} could not write its part: {}", rank,
                               reason.empty() ? "there was no room to say why; see its own message" : reason);
      }
      if (!folder.has(report_name(rank))) return false;
      const InputFile file = folder.open_file(report_name(rank));
      merge(reports.index, parse_index(file.text(kMaxJsonBytes), file.path()), file.path());
      return true;
    });
    if (missing.empty()) break;
    if (cancelled && cancelled())
      throw EnvironmentError("[checkpoint.shard] the save of step {} was abandoned", step);
    if (monotonic_seconds() > deadline) {
      throw EnvironmentError(
          "[checkpoint.shard] ranks {} have not written their parts of step {} within {:.0f} s; check their "
          "disks, and that every rank sees the same {}",
          fmt::join(missing, ", "), step, seconds, folder.path());
    }
    std::this_thread::sleep_for(kPollEvery);
  }
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const auto state = reports.index.metadata.extract(fmt::format("{}{}", kStatePrefix, rank));
    if (!state.empty()) reports.states.emplace(rank, state.mapped());
  }
  return reports;
}

void remove_reports(const Folder& folder, int64_t ranks) {
  for (int64_t rank = 0; rank < ranks; ++rank) folder.remove(report_name(rank));
}

}  // namespace trireme::checkpoint
