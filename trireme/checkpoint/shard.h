#pragma once
// One rank's part of a checkpoint: a safetensors file of its pieces, and a report of it for the rank that
// commits. The folder is all that ranks share, so a thread can write both during training.
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/index.h"

namespace trireme::checkpoint {

struct PieceSpec {
  std::string tensor;
  std::string dtype;  ///< as safetensors has it
  plan::Shape shape;  ///< of the whole tensor
  plan::Region region;
};

struct ShardSpec {
  int64_t rank = 0;
  int64_t step = 0;
  int64_t generation = 0;
  std::vector<PieceSpec> pieces;                ///< those without elements are left out
  std::map<std::string, std::string> metadata;  ///< ranks with the same key have the same value
  std::string state;  ///< JSON that only this rank needs again, such as a random generator's; empty: none
};

/// Bytes of piece `index` of a ShardSpec, until the next call.
using PieceSource = std::function<const void*(size_t index)>;

/// Writes "shard-00000.safetensors" and, when that is on the disk, the report. Asks for each piece once, in
/// the order of the file. Throws EnvironmentError when the disk fails.
void write_shard(const Folder& folder, const ShardSpec& spec, const PieceSource& source);

/// Tells the rank that commits that this one has failed, as far as the disk lets it.
void report_failure(const std::string& folder, int64_t rank, const std::string& reason) noexcept;

/// The reports of all ranks as one index, and their states by rank.
struct Reports {
  Index index;
  std::map<int64_t, std::string> states;
};

/// Waits until every rank has reported. Throws EnvironmentError when one reports a failure, when `seconds`
/// have passed, naming who is missing, or when `cancelled` says so; DataError when reports do not fit.
Reports collect_reports(const Folder& folder, int64_t step, int64_t generation, int64_t ranks, double seconds,
                        const std::function<bool()>& cancelled = {});

/// Removes the reports, which the index makes superfluous.
void remove_reports(const Folder& folder, int64_t ranks);

}  // namespace trireme::checkpoint
