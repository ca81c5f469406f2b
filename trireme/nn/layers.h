#pragma once
// Modules with parameters. Parameters are created uninitialised; init.h or the engine fills them.
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "trireme/nn/functional.h"
#include "trireme/nn/recomputed.h"

namespace trireme::nn {

/// An adapter of a linear layer (plan/adapter.h).
struct LowRank {
  int64_t rank = 0;
  double scale = 0.0;    ///< of its product
  double dropout = 0.0;  ///< probability with which an element of what A reads is dropped in training
  bool lengths = false;  ///< those of the rows of what the layer computes are trained, too (DoRA)
};

class Linear : public torch::nn::Module {
 public:
  /// `weight` (out, in), or (in, out) with WeightLayout::kInOut, and `bias` (out) if `with_bias`: fp32 on the
  /// CPU.
  Linear(int64_t in, int64_t out, bool with_bias, WeightLayout layout = WeightLayout::kOutIn);
  /// (..., in) -> (..., out), plus `residual`, which may be undefined
  at::Tensor forward(const at::Tensor& x, const at::Tensor& residual = {},
                     const std::optional<Fp8Recipe>& fp8 = {}, Output output = Output::kRead,
                     const Joints& joints = {}) const;

  /// Adds scale (x A^T) B^T to what the layer computes: registers the modules lora_A, whose weight is A
  /// (rank, in), and lora_B, of B (out, rank), and with lengths the parameter lora_magnitude_vector (out),
  /// which is added to the lengths of the rows of the weight.
  void add_adapter(const LowRank& adapter);
  bool has_adapter() const { return adapter_in_ != nullptr; }
  /// Whether A reads what the weight reads: there is an adapter, and nothing is dropped in between.
  bool taps() const { return has_adapter() && !drops(); }
  /// forward() where A has read the layer's input: `tapped` are A's product (..., rank) with it, and the
  /// input. For layers that tap. Joints are those of the layer, of which A has had the one behind.
  at::Tensor forward(const Tapped& tapped, const at::Tensor& residual, const std::optional<Fp8Recipe>& fp8,
                     Output output, const Joints& joints) const;
  /// x (..., in) -> what an adapter that does not tap adds to the product of x and the weight, (..., out),
  /// plus `residual`; without an adapter `residual`.
  at::Tensor beside(const at::Tensor& x, const at::Tensor& residual = {}, Output output = Output::kRead,
                    const Joints& joints = {}) const;
  /// (out) fp32, by which the sum is multiplied; undefined where it is not.
  at::Tensor lengths(const JointPtr& after = {}) const;
  WeightLayout layout() const { return layout_; }
  const LowRank& adapter() const { return adapter_; }
  const at::Tensor& adapter_a() const { return adapter_in_->weight; }
  const at::Tensor& adapter_b() const { return adapter_out_->weight; }

  at::Tensor weight;
  at::Tensor bias;  ///< (out); undefined without one

 private:
  int64_t in_, out_;
  WeightLayout layout_;
  bool drops() const { return adapter_.dropout > 0.0 && is_training(); }
  at::Tensor low_rank(const at::Tensor& thin, const at::Tensor& residual, Output output,
                      const JointPtr& before) const;
  at::Tensor length_ratio(const JointPtr& after) const;

  std::shared_ptr<Linear> adapter_in_, adapter_out_;
  at::Tensor magnitude_;  ///< (out); undefined without one
  LowRank adapter_;
};

// Layers with their adapters.

/// Several linear layers without biases on one input: (..., sum of out_i), as linear_group(). The matrices A
/// of their adapters read it once, and B are the blocks of one matrix.
at::Tensor linear_group(const at::Tensor& x, const std::vector<const Linear*>& layers,
                        const std::optional<Fp8Recipe>& fp8 = {}, const JointPtr& before = {});
/// {x + delta, the layer's or layers' output for the norm of it}, as add_norm_linear(): the norm is computed
/// again in backward, unless an adapter drops some of it.
std::pair<at::Tensor, at::Tensor> add_norm_linear(const at::Tensor& x, const at::Tensor& delta,
                                                  const Norm& norm, const Linear& layer,
                                                  const std::optional<Fp8Recipe>& fp8 = {},
                                                  const JointPtr& before = {});
std::pair<at::Tensor, at::Tensor> add_norm_linear(const at::Tensor& x, const at::Tensor& delta,
                                                  const Norm& norm, const std::vector<const Linear*>& layers,
                                                  const std::optional<Fp8Recipe>& fp8 = {},
                                                  const JointPtr& before = {});
/// The layer's output for activation(x), plus `residual`, as activated_linear().
at::Tensor activated_linear(const at::Tensor& x, Activation activation, const Linear& layer,
                            const at::Tensor& residual = {}, const std::optional<Fp8Recipe>& fp8 = {},
                            const JointPtr& after = {});

class Embedding : public torch::nn::Module {
 public:
  /// `weight` (rows, width), fp32 on the CPU.
  Embedding(int64_t rows, int64_t width);
  /// (...) int64 -> (..., width); with a joint as embedding() of joint.h has it.
  at::Tensor forward(const at::Tensor& indices, const JointPtr& joint = {}) const;

  at::Tensor weight;  ///< (rows, width)
};

class LayerNorm : public torch::nn::Module {
 public:
  /// Over a last dimension of `width`; `eps` is added to the variance. `weight` and `bias` (width), fp32 on
  /// the CPU.
  LayerNorm(int64_t width, double eps);
  at::Tensor forward(const at::Tensor& x) const { return layer_norm(x, weight, bias, eps_); }
  /// {x + delta, norm of it}
  std::pair<at::Tensor, at::Tensor> add_forward(const at::Tensor& x, const at::Tensor& delta,
                                                const std::optional<Fp8Recipe>& fp8 = {}) const {
    return add_layer_norm(x, delta, weight, bias, eps_, fp8);
  }
  Norm norm() const { return {weight, bias, eps_}; }

  at::Tensor weight, bias;  ///< (width)

 private:
  double eps_;
};

class RmsNorm : public torch::nn::Module {
 public:
  /// Over a last dimension of `width`; `eps` is added to the mean square. `weight` (width), fp32 on the CPU.
  RmsNorm(int64_t width, double eps);
  at::Tensor forward(const at::Tensor& x) const { return rms_norm(x, weight, eps_); }
  /// {x + delta, norm of it}
  std::pair<at::Tensor, at::Tensor> add_forward(const at::Tensor& x, const at::Tensor& delta,
                                                const std::optional<Fp8Recipe>& fp8 = {}) const {
    return add_rms_norm(x, delta, weight, eps_, fp8);
  }
  Norm norm() const { return {weight, {}, eps_}; }

  at::Tensor weight;  ///< (width)

 private:
  double eps_;
};

/// A module that only holds others under a name, so that parameters get their Hugging Face paths.
class Namespace : public torch::nn::Module {};

}  // namespace trireme::nn
