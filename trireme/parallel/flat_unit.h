#pragma once
// A group of parameters that lives in flat buffers: gathered, reduced and updated together. Module parameters
// are views into the flat parameter buffer and their gradients views into the flat gradient buffer, so
// collectives work on the memory that the module uses, without copies in or out.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/optim/optimizer.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/policy.h"

namespace trireme::parallel {

/// Writes elements [first, first + out.size()) of the parameter `name`, counted in row-major order.
using Initializer = std::function<void(const std::string& name, int64_t first, std::span<float> out)>;

struct FlatOptions {
  plan::Policy policy;
  at::ScalarType compute = at::kFloat;  ///< of parameters and gradients as the module sees them
  at::ScalarType reduce = at::kFloat;   ///< of gradients on the wire; sums are fp32
  at::Device device = at::kCPU;
};

class FlatUnit {
 public:
  /// Takes over `params` (name and leaf tensor, in flat order): their data and gradients become views of flat
  /// buffers.
  FlatUnit(std::string name, const std::vector<std::pair<std::string, at::Tensor>>& params,
           const FlatOptions& options, std::shared_ptr<comm::Group> group, const Initializer& initializer);

  const std::string& name() const { return name_; }
  const plan::FlatLayout& layout() const { return layout_; }

  /// Makes the full parameters present; does nothing when they are. Collective for policies that shard them.
  void gather_parameters();
  /// Frees them under policies that shard them.
  void release_parameters();

  /// Makes the full gradients present; zeroes them unless this step has already accumulated into them.
  void prepare_gradients();
  /// After a backward pass. Sums gradients over the group into this rank's fp32 range; fp32 gradients wait
  /// for the last micro-batch of the step, bf16 ones are summed in fp32 after each. Collective.
  void reduce_gradients(bool last_micro_batch);
  /// Whether this step has reduced anything yet.
  bool reduced() const { return reduced_any_; }

  /// Sum of squares of the reduced gradient over this rank's shard.
  double shard_grad_squares() const;

  /// What the optimizer updates on this rank.
  optim::FlatParam optimizer_param() const;
  /// Makes updated parameters visible to the module: gathers them, or drops stale ones. Ends the step.
  /// Collective.
  void publish_update();

  /// The fp32 master of all parameters (layout().numel()), on every rank of the group. Collective.
  at::Tensor full_master() const;

 private:
  bool shards_parameters() const { return options_.policy.shard_parameters && group_->size() > 1; }
  bool fp32_compute() const { return options_.compute == at::kFloat; }
  plan::Range optimizer_range() const;
  at::Tensor shard_of(const at::Tensor& flat) const;
  void allocate_buffers();
  void adopt(const std::vector<std::pair<std::string, at::Tensor>>& params);
  void fill_master(const Initializer& initializer);
  at::Tensor reduced_shard() const;

  std::string name_;
  FlatOptions options_;
  std::shared_ptr<comm::Group> group_;
  plan::FlatLayout layout_;

  at::Tensor full_params_;  ///< (numel) compute dtype; its storage may be freed
  at::Tensor full_grads_;   ///< (numel) compute dtype; its storage may be freed
  at::Tensor master_;       ///< optimizer_range(), fp32; may be a part of full_params_
  at::Tensor
      compute_shard_;   ///< (shard_numel) what all-gather sends when parameters are sharded; may be master_
  at::Tensor reduced_;  ///< optimizer_range(), fp32; may be a part of full_grads_
  bool gradients_pending_ = false;  ///< full_grads_ holds something that was not reduced yet
  bool reduced_any_ = false;        ///< reduced_ holds a sum of this step
};

}  // namespace trireme::parallel
