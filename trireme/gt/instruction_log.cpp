#include "trireme/gt/instruction_log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace gt {
namespace {

using trireme::plan::PlacedInstruction;
using trireme::plan::TensorPlacement;

std::string in_words(const TensorPlacement& placement) {
  if (placement.is_shard()) return fmt::format("sharded along {}", placement.dim);
  return placement.is_replicate() ? "replicated" : "partial sums";
}

}  // namespace

InstructionLog::InstructionLog(const std::string& path) : file_(path, std::ios::trunc) {
  if (!file_)
    throw trireme::EnvironmentError(
        "[gt.log] cannot write the instruction log {}; name a file in a folder that is "
        "there",
        path);
}

void InstructionLog::write(const std::string& place, const std::string& instruction,
                           const PlacedInstruction& placed, const std::vector<int64_t>& workers) {
  std::vector<std::string> results;
  for (const auto& result : placed.results)
    results.push_back(fmt::format("{} {}", to_text(result.type), in_words(result.placement)));
  const int64_t bytes = (placed.op ? placed.op->bytes() : 0) + placed.cross.bytes;
  file_ << fmt::format("{:06} {} {} | workers {}{}{}\n", lines_++, place, instruction,
                       fmt::join(workers, " "), results.empty() ? "" : " | " + trireme::join(results, "; "),
                       bytes == 0 ? "" : fmt::format(" | moves {} bytes", bytes));
}

void InstructionLog::error(const std::string& what) {
  file_ << fmt::format("{:06} ERROR {}\n", lines_++, what) << std::flush;
}

}  // namespace gt
