#pragma once
// Communication hooks: gradients that travel smaller than they are. What a rank could not send it keeps and
// adds to the next gradient (error feedback), so that nothing is lost for good. Every rank computes the same
// sum, so all policies still agree bit for bit under one hook.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/plan/choices.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::parallel {

using Hook = plan::CommHook;

struct HookOptions {
  Hook hook = Hook::kNone;
  int64_t rank = 4;         ///< PowerSGD: columns of the thin matrices
  double density = 0.01;    ///< top-k: share of elements that travel
  int64_t start_step = 10;  ///< PowerSGD, top-k: steps of plain reduction before
  int64_t local_steps = 8;  ///< local SGD: steps between averages
};

/// What a compressor remembers for one parameter.
struct HookState {
  at::Tensor owed;    ///< (elements of the parameter) fp32: what this rank has yet to send; none: nothing yet
  at::Tensor factor;  ///< PowerSGD: (columns, rank) fp32, where its next step begins, equal on all ranks
  int64_t steps = 0;  ///< updates so far whose gradient a hook that starts late has reduced
};

/// One unit's compressor, with what it remembers between steps.
class Compressor {
 public:
  virtual ~Compressor() = default;
  /// shard (m) fp32 = this rank's part, elements [rank m, rank m + m), of the sum over `group` of grad (n m),
  /// fp32 or bf16, in units that do not change from step to step. What the compressor remembers stays as it
  /// was until commit(); further reductions of the step go on from what this one left out. Collective.
  virtual void reduce(comm::Group& group, at::Tensor& shard, const at::Tensor& grad) = 0;
  /// The reduced gradient was applied: what the reduction left out is owed from now on.
  virtual void commit() {}
  /// The reduced gradient was not applied: what the reduction left out is forgotten.
  virtual void discard() {}
  /// What is still owed to later steps (n m) fp32; undefined before the first commit() and for hooks that owe
  /// nothing.
  virtual at::Tensor error() const { return {}; }
  /// What the compressor remembers for a parameter of the layout; its tensors share the compressor's memory.
  virtual HookState state(const plan::FlatEntry&) const { return {}; }
  /// Replaces what the compressor remembers, an entry for each parameter in the layout's order; tensors are
  /// copied to the gradient's device.
  virtual void set_state(const std::vector<HookState>&) {}
};

/// The compressor of a unit with this layout, which must outlive it; null for hooks that do not change how a
/// gradient is summed.
std::unique_ptr<Compressor> make_compressor(const HookOptions& options, const plan::FlatLayout& layout);

}  // namespace trireme::parallel
