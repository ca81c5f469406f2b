#pragma once
// The kinds of actions of a step; passes of schedules and events of pipelines are of the same kinds.
#include <algorithm>
#include <array>
#include <string_view>

#include "trireme/plan/choices.h"

namespace trireme::plan {

enum class ActionKind {
  kUnshard,  ///< whole parameters of a unit are gathered
  kForward,
  kReshard,         ///< whole parameters are freed
  kBackward,        ///< both of the following
  kBackwardInput,   ///< the gradient of the input, which the stage before waits for
  kBackwardWeight,  ///< the gradient of the weights, which nobody waits for
  kAccumulate,      ///< gradients of a micro-batch stay with this rank: the next one is added to them
  kSumTied,         ///< gradients of tied parameters become the sums of those of all copies
  kReduce,          ///< gradients are summed over the ranks
  kGatherSum,       ///< ranks that update all of a unit gather its sum
  kUpdate,
  kSend,  ///< what the last pass has made leaves for `peer`; does not wait
  kPost,  ///< from now on the next message of `peer` may arrive in `buffer`; does not wait
  kRecv,  ///< waits until the oldest posted message of `peer` is in `buffer`
  kWait   ///< the lane goes on once another action has run (Action::awaits)
};
template <>
inline constexpr auto kNames<ActionKind> = std::to_array<std::string_view>(
    {"unshard", "forward", "reshard", "backward", "backward_input", "backward_weight", "accumulate",
     "sum_tied", "reduce", "gather_sum", "update", "send", "post", "recv", "wait"});

/// The kinds that compute: forward and backward passes, and the two parts of a backward pass.
inline constexpr std::array kPassKinds = {ActionKind::kForward, ActionKind::kBackward,
                                          ActionKind::kBackwardInput, ActionKind::kBackwardWeight};
/// The place of `kind` in kPassKinds; their number where it does not compute.
constexpr size_t pass_index(ActionKind kind) {
  return static_cast<size_t>(std::ranges::find(kPassKinds, kind) - kPassKinds.begin());
}
constexpr bool computes(ActionKind kind) {
  return pass_index(kind) < kPassKinds.size();
}

}  // namespace trireme::plan
