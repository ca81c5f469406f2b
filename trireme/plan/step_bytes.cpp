// Bytes of a step program: those that a rank sends, and those that it holds at each action.
#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {

std::vector<Transfer> Action::transfers_along(Along along) const {
  std::vector<Transfer> found;
  std::ranges::copy_if(transfers, std::back_inserter(found),
                       [along](const Transfer& transfer) { return transfer.along == along; });
  return found;
}

int64_t Action::wire_bytes() const {
  return std::accumulate(transfers.begin(), transfers.end(), int64_t{0},
                         [](int64_t sum, const Transfer& transfer) { return sum + transfer.bytes; });
}

int64_t StepProgram::wire_bytes() const {
  return std::accumulate(actions.begin(), actions.end(), int64_t{0},
                         [](int64_t sum, const Action& action) { return sum + action.wire_bytes(); });
}

int64_t StepProgram::wire_bytes(int64_t micro_batches) const {
  int64_t middle = 0, there = 0;
  for (const Pass& pass : passes) {
    there = std::max(there, pass.micro_batch + 1);
    if (pass.micro_batch != 1) continue;
    for (int64_t at = pass.begin; at < pass.end; ++at)
      middle += actions[static_cast<size_t>(at)].wire_bytes();
  }
  const int64_t repeated = std::max<int64_t>(0, micro_batches - std::max(there, kMicroBatchesShown));
  int64_t sum = 0;
  const bool beyond =
      __builtin_mul_overflow(repeated, middle, &sum) || __builtin_add_overflow(sum, wire_bytes(), &sum);
  return beyond ? std::numeric_limits<int64_t>::max() : sum;
}

std::optional<int64_t> sent_bytes(const StepProgram& program, const EngineSetting& setting,
                                  int64_t micro_batches) {
  const int64_t ranks = setting.shard_ranks();
  if (!hook_obstacle(setting.policy, setting.hook).empty()) return std::nullopt;
  if (starts_late(setting.hook) && ranks > 1) return std::nullopt;
  int64_t sent = program.wire_bytes(micro_batches);
  for (const ProgramUnit& unit : program.units) {
    if (!setting.reduces_locally()) break;
    const int64_t bytes = kFp32Bytes * unit.numel;
    sent +=
        wire_bytes(Collective::kAllToAll, bytes, ranks) + wire_bytes(Collective::kAllGather, bytes, ranks);
  }
  return sent;
}

bool Buffer::has_memory_at(int64_t action) const {
  if (is_kept()) return true;
  return from <= to ? from <= action && action <= to : from <= action || action <= to;
}

int64_t HeldBytes::total() const {
  int64_t sum = 0;
  for (const int64_t bytes : by_role) {
    if (__builtin_add_overflow(sum, bytes, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

HeldBytes kept_bytes(const StepProgram& program) {
  HeldBytes held;
  for (const Buffer& buffer : program.buffers) {
    if (buffer.is_kept() && !buffer.part_of) held[buffer.role] += buffer.bytes;
  }
  return held;
}

std::vector<HeldBytes> held_bytes(const StepProgram& program) {
  const HeldBytes kept = kept_bytes(program);
  const size_t count = program.actions.size();
  std::vector<HeldBytes> changes(count + 1);  // between an action and the one before
  const auto add = [&](const Buffer& buffer, size_t from, size_t end) {
    changes[from][buffer.role] += buffer.bytes;
    changes[end][buffer.role] -= buffer.bytes;
  };
  for (const Buffer& buffer : program.buffers) {
    if (buffer.is_kept() || buffer.part_of) continue;
    TRIREME_CHECK(std::max(buffer.from, buffer.to) < std::ssize(program.actions),
                  "[plan.step] a buffer lives from action {} to {} of {}", buffer.from, buffer.to, count);
    const auto from = static_cast<size_t>(buffer.from), end = static_cast<size_t>(buffer.to) + 1;
    if (buffer.from <= buffer.to) {
      add(buffer, from, end);
    } else {
      add(buffer, 0, end);
      add(buffer, from, count);
    }
  }
  std::vector<HeldBytes> held(count, kept);
  for (size_t role = 0; role < kNames<Role>.size(); ++role) {
    int64_t sum = 0;
    for (size_t action = 0; action < count; ++action) {
      sum += changes[action].by_role[role];
      held[action].by_role[role] += sum;
    }
  }
  return held;
}

bool has_countable_bytes(const StepProgram& program) {
  int64_t held = 0, sent = 0;
  bool fits = true;
  const auto add = [&](int64_t& sum, int64_t bytes) {
    fits = fits && bytes >= 0 && !__builtin_add_overflow(sum, bytes, &sum);
  };
  for (const Buffer& buffer : program.buffers) add(held, buffer.bytes);
  for (const Action& action : program.actions) {
    for (const Transfer& transfer : action.transfers) add(sent, transfer.bytes);
  }
  return fits;
}

}  // namespace trireme::plan
