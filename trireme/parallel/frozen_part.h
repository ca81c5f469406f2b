#pragma once
// The parameters of a unit that are frozen for good, as the weights under adapters are. They have a flat
// buffer of their own in the dtype of computation, without gradients, masters and optimizer state, and are
// gathered and freed with the unit. A rank keeps its shard of them where the policy shards parameters, or
// else all of them.
//
// Where the layout has parameters in NF4 the buffer is blocks of these, and linear layers are lent those of
// their weights; the other parameters, norms and biases, stay whole on every rank in the dtype of
// computation, and what the buffer has in their places has no meaning.
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
  /// each. Leaves in NF4 have no memory, and using it throws.
  FrozenPart(plan::FlatLayout layout, Params params, const Options& options, bool comes_and_goes,
             comm::Group& group, StoragePool& pool, const Initializer& initializer);

  /// Takes back what it has lent to linear layers; leaves in NF4 stay without memory.
  ~FrozenPart();
  FrozenPart(const FrozenPart&) = delete;
  FrozenPart& operator=(const FrozenPart&) = delete;

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

  /// All parameters on every rank, as gather() fills them, for value_of(). Collective where they are sharded.
  at::Tensor gathered(comm::Group& group) const;
  /// One parameter, of its shape in the dtype of computation, decoded where it is in NF4.
  at::Tensor value_of(const at::Tensor& gathered, size_t index) const;
  /// Bytes that are kept from step to step.
  int64_t bytes() const;
  /// Bytes that whole parameters take beside them.
  int64_t bytes_to_gather() const;

  /// Throws LogicError naming a parameter that requires a gradient all the same.
  void check() const;

 private:
  bool in_nf4() const { return rest_.defined(); }
  int64_t kept_of(int64_t elements) const;
  at::Tensor whole_rest(size_t index) const;
  at::Tensor place_of(size_t index) const;
  void adopt();
  void load_blocks(const Initializer& values);

  plan::FlatLayout layout_;
  Params params_;
  StoragePool& pool_;
  plan::Range range_;  ///< of the layout, that this rank keeps
  bool comes_and_goes_;
  at::Tensor whole_;  ///< (numel), or the bytes of their blocks; its storage comes and goes
  at::Tensor shard_;  ///< this rank's range of it; undefined where parameters stay whole
  at::Tensor rest_;   ///< parameters that are not in NF4, one behind the other; undefined: none are
  std::vector<int64_t> places_;  ///< of parameters in rest_
  at::Tensor hollow_;            ///< (numel) without memory, of which leaves in NF4 are views
};

}  // namespace trireme::parallel
