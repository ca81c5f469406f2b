#include "trireme/plan/program_bytes.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "trireme/plan/placer.h"

namespace trireme::plan {
namespace {

/// The bytes of a tensor that a worker, number `place` of `count`, has.
int64_t bytes_on(const PlacedTensor& tensor, int64_t place, int64_t count) {
  if (!tensor.placement.is_shard()) return tensor.type.bytes();
  const int64_t size = tensor.type.shape.at(static_cast<size_t>(tensor.placement.dim));
  return size == 0 ? 0 : tensor.type.bytes() / size * shard_range(size, count, place).size();
}

}  // namespace

int64_t number_workers(Program& program) {
  std::map<int64_t, int64_t> numbers;
  for (const std::vector<int64_t>& workers : program.workers)
    for (const int64_t worker : workers) numbers.emplace(worker, 0);
  int64_t next = 0;
  for (auto& [worker, number] : numbers) number = next++;
  for (std::vector<int64_t>& workers : program.workers)
    for (int64_t& worker : workers) worker = numbers.at(worker);
  return next;
}

std::vector<int64_t> program_bytes(const Program& program, int64_t workers, const std::string& name,
                                   bool is_explicit) {
  Placer placer(is_explicit);
  for (size_t i = 0; i < program.workers.size(); ++i)
    placer.add_signal(program.signals[i], program.workers[i]);
  for (const DatasetSpec& dataset : program.datasets) placer.add_dataset(dataset);
  std::vector<int64_t> now(static_cast<size_t>(workers)), most = now;
  const auto add = [&](const PlacedTensor& tensor, int64_t sign) {
    const std::vector<int64_t>& group = placer.groups()[static_cast<size_t>(tensor.group)];
    for (size_t i = 0; i < group.size(); ++i) {
      int64_t& held = now.at(static_cast<size_t>(group[i]));
      held += sign * bytes_on(tensor, static_cast<int64_t>(i), std::ssize(group));
      int64_t& peak = most[static_cast<size_t>(group[i])];
      peak = std::max(peak, held);
    }
  };
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const Instruction& one = program.instructions[i];
    placer.set_place(fmt::format("{}: instruction {}", name, i + 1));
    const PlacedInstruction placed = placer.place(one);
    if (one.kind == InstructionKind::kFree) add(placed.operands.at(0), -1);
    for (const PlacedTensor& made : placed.results) add(made, 1);
  }
  return most;
}

}  // namespace trireme::plan
