#pragma once
// Batch normalisation (Ioffe and Szegedy 2015) over the samples of all ranks of a group, as PyTorch's
// torch.nn.SyncBatchNorm. It stands in a model where torch::nn::BatchNorm1d, 2d or 3d would, and has their
// names of parameters and buffers:
//
//   norm = register_module("norm", std::make_shared<parallel::SyncBatchNorm>(64, mesh.dp));
//
// Every rank runs the same layers in the same order, forward and backward. A rank without data passes an
// empty batch through the model; DataParallel::shadow_micro_batch() would leave the others waiting.
#include <torch/nn/module.h>

#include <memory>
#include <optional>

#include "trireme/comm/group.h"

namespace trireme::parallel {

/// As torch::nn::BatchNormOptions.
struct SyncBatchNormOptions {
  double eps = 1e-5;                     ///< added to the variance
  std::optional<double> momentum = 0.1;  ///< weight of the newest batch; none: all batches weigh the same
  bool affine = true;                    ///< with weight and bias
  bool track_running_stats = true;       ///< without, evaluation normalises each rank's batch by itself
};

/// Batch norm over the batches of all ranks of a group, for inputs (N, C) or (N, C, ...).
class SyncBatchNorm : public torch::nn::Module {
 public:
  /// Parameters (C) are ones and zeros, on the CPU as those of torch's modules. Throws LogicError for
  /// features < 1, no group, eps < 0 and a momentum outside of [0, 1].
  SyncBatchNorm(int64_t features, std::shared_ptr<comm::Group> group,
                const SyncBatchNormOptions& options = {});

  /// x (N, C) or (N, C, ...) of fp32, bf16 or fp16 -> the same shape and dtype; statistics are fp32 or wider.
  ///
  /// In training mode collective over the group, with any N on each rank, also 0: one all_gather of (2C + 1)
  /// fp64 values here, and one all_reduce of (2C) fp32 values in backward where x needs a gradient. The
  /// gradients of weight and bias are this rank's part; the data-parallel engine adds them up. In evaluation
  /// mode there is no communication. Throws LogicError for other shapes and dtypes, for fewer than two values
  /// per channel over all ranks in training mode, and from a backward pass that is to be differentiated
  /// itself. `updates` false leaves running statistics as they are, for a pass that repeats an earlier one.
  at::Tensor forward(const at::Tensor& x, bool updates = true);

  at::Tensor weight, bias;               ///< (C); undefined unless affine
  at::Tensor running_mean, running_var;  ///< (C), the variance unbiased; undefined unless tracked
  at::Tensor num_batches_tracked;        ///< int64 scalar

 private:
  struct Moments;

  void check_input(const at::Tensor& x) const;
  void check_count(const at::Tensor& x, const Moments& moments) const;
  Moments gather_moments(const at::Tensor& x) const;
  void update_running_statistics(const Moments& moments);
  at::Tensor evaluate(const at::Tensor& x) const;

  int64_t features_;
  std::shared_ptr<comm::Group> group_;
  SyncBatchNormOptions options_;
};

}  // namespace trireme::parallel
