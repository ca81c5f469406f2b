#include "trireme/gt/instruction_log.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"

namespace gt {
namespace {

using trireme::plan::PlacedInstruction;
using trireme::plan::TensorPlacement;

std::string in_words(const TensorPlacement& placement) {
  if (placement.is_shard()) return fmt::format("sharded along {}", placement.dim);
  return placement.is_replicate() ? "replicated" : "partial sums";
}

std::ofstream opened(const std::string& path, const char* what) {
  std::ofstream file(path, std::ios::trunc);
  if (!file)
    throw trireme::EnvironmentError("[gt.log] cannot write the {} {}; name a file in a folder that is there",
                                    what, path);
  return file;
}

}  // namespace

InstructionLog::InstructionLog(const std::string& path) : file_(opened(path, "instruction log")) {}

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

ProgramFile::ProgramFile(const std::string& path) : path_(path), file_(opened(path, "program file")) {
  file_ << to_text(trireme::plan::Program());
}

void ProgramFile::add_signal(const std::string& name, const std::vector<int64_t>& workers) {
  file_ << fmt::format("signal {} workers={}\n", name, fmt::join(workers, ","));
}

void ProgramFile::add_dataset(const trireme::plan::DatasetSpec& dataset) {
  file_ << to_text(dataset) << '\n';
}

void ProgramFile::write(const trireme::plan::Instruction& one, const std::vector<std::string>& signals) {
  file_ << to_text(one, signals) << '\n';
}

ProgramFile::~ProgramFile() {
  if (!file_.flush())
    trireme::log_warning("[gt.log] the program file {} is not complete: what was written last found no room",
                         path_);
}

}  // namespace gt
