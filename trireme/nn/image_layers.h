#pragma once
// Layers of models of images. x is (B, C, H, W), in memory contiguous or channels-last. Parameters are
// created uninitialised.
#include <torch/nn/module.h>

#include <functional>
#include <memory>

namespace trireme::nn {

/// Whether a norm in training mode updates running statistics: a batch counts once, also where backward
/// computes its activations again.
enum class Statistics { kUpdate, kLeave };

/// The operations behind a norm: y + residual where there is one, then ReLU where it is asked for.
struct After {
  at::Tensor residual = {};  ///< as y
  bool relu = false;
};
/// Applies `after` to y in place, and returns y.
at::Tensor apply_after(at::Tensor y, const After& after);

/// A normalisation of channels: its module has the parameters and buffers.
struct NormLayer {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor& x, Statistics statistics, const After& after)> apply;
};
/// Makes a norm for so many channels.
using NormMaker = std::function<NormLayer(int64_t channels)>;

class Conv2d : public torch::nn::Module {
 public:
  struct Shape {
    int64_t out, in, kernel;
    int64_t stride = 1, padding = 0;
    bool with_bias = false;
  };
  explicit Conv2d(const Shape& shape);
  at::Tensor forward(const at::Tensor& x) const;

  at::Tensor weight;  ///< (out, in, kernel, kernel)
  at::Tensor bias;    ///< (out); undefined without one

 private:
  int64_t stride_, padding_;
};

/// Over the samples and positions of x (Ioffe and Szegedy 2015), as torch.nn.BatchNorm2d with its defaults. A
/// batch of no samples leaves running statistics alone. Statistics are fp32 whatever the dtype of x and of
/// the parameters.
class BatchNorm : public torch::nn::Module {
 public:
  explicit BatchNorm(int64_t channels);
  /// Throws ConfigError for one value per channel in training mode, which has no variance.
  at::Tensor forward(const at::Tensor& x, Statistics statistics = Statistics::kUpdate,
                     const After& after = {});

  at::Tensor weight, bias;               ///< (C)
  at::Tensor running_mean, running_var;  ///< (C) fp32, the variance unbiased
  at::Tensor num_batches_tracked;        ///< int64 scalar

 private:
  bool is_fused(const at::Tensor& x, const After& after) const;
  at::Tensor unfused(const at::Tensor& x, Statistics statistics);
};

/// Over groups of channels of one sample (Wu and He 2018), as torch.nn.GroupNorm.
class GroupNorm : public torch::nn::Module {
 public:
  /// `groups` divides `channels`.
  GroupNorm(int64_t groups, int64_t channels);
  at::Tensor forward(const at::Tensor& x, const After& after = {}) const;

  at::Tensor weight, bias;  ///< (C)

 private:
  int64_t groups_;
};

NormMaker batch_norms();
NormMaker group_norms(int64_t groups);

}  // namespace trireme::nn
