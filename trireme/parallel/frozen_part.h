#pragma once
// The parameters of a unit that are frozen for good, as the weights under adapters are. They have a flat
// buffer of their own in the dtype of computation, without gradients, masters and optimizer state, and are
// gathered and freed with the unit. A rank keeps its shard of them where the policy shards parameters, or
// else all of them.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/parallel/options.h"
#include "trireme/parallel/storage.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::parallel {

class FrozenPart {
 public:
  using Params = std::vector<std::pair<std::string, at::Tensor>>;

  /// Takes over `params`, leaf tensors that `layout` lists in their order: they require no gradient from now
  /// on, and their data become views of one buffer, filled by `initializer`. With `comes_and_goes` that
  /// buffer has memory of `pool` from gather() to free() alone; `group` are the ranks that have one shard
  /// each.
  FrozenPart(plan::FlatLayout layout, Params params, const Options& options, bool comes_and_goes,
             comm::Group& group, StoragePool& pool, const Initializer& initializer);

  const plan::FlatLayout& layout() const { return layout_; }
  bool is_whole() const { return has_storage(whole_); }

  /// Replaces what this rank keeps of the values. Throws LogicError where what was gathered would keep the
  /// old ones.
  void load(const Initializer& values);

  /// Gives the whole parameters memory, which gather() fills.
  void allocate();
  /// All-gathers the shards on the current stream. Collective.
  void gather(comm::Group& group);
  /// From now on what is gathered stays.
  void stay() { comes_and_goes_ = false; }
  /// Frees what was gathered; using it throws with `reason` then.
  void free(const std::string& reason);

  /// All parameters on every rank, (layout().numel()) in the dtype of computation. Collective where they are
  /// sharded.
  at::Tensor gathered(comm::Group& group) const;
  /// Bytes that are kept from step to step.
  int64_t bytes() const;
  /// Bytes that whole parameters take beside them.
  int64_t bytes_to_gather() const;

  /// Throws LogicError naming a parameter that requires a gradient all the same.
  void check() const;

 private:
  plan::FlatLayout layout_;
  Params params_;
  StoragePool& pool_;
  int64_t first_ = 0;  ///< element of the layout with which shard_ begins
  bool comes_and_goes_;
  at::Tensor whole_;  ///< (numel); its storage comes and goes
  at::Tensor shard_;  ///< this rank's range of it; undefined where parameters stay whole
};

}  // namespace trireme::parallel
