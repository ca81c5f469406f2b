#pragma once
// The product of a linear layer and its gradients, shared by the autograd functions that contain one. Weights
// that are neighbours in memory are multiplied as one matrix.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <initializer_list>
#include <optional>
#include <utility>
#include <vector>

#include "trireme/nn/fp8.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/joint.h"

namespace trireme::nn {

struct LinearParams {
  at::TensorList weights;  ///< (out_i, in) each, or one (in, out) when in_out
  const at::Tensor& bias;  ///< (out) or undefined
  bool in_out;
  std::optional<Fp8Recipe> fp8 = {};  ///< none: products in the dtype of the weights
  /// Where the layer is cut over ranks: rows that this rank has are n of N, on one side of it.
  Joints joints = {};
};

/// A factor of the gradient of weights: rows (n, features) as they are or, in FP8, their transposed copy.
struct Factor {
  at::Tensor rows;
  kernels::Fp8Matrix columns;  ///< (features, n)
  at::Tensor sums = {};        ///< over the rows, (features) fp32, where they are known

  /// False of the input of a layer of which nothing was trained when it ran, whatever has been thawed since.
  bool defined() const { return rows.defined() || columns.defined(); }
};

/// The tensors that apply_linear() keeps for backward.
struct LinearKept {
  Factor input;                        ///< if it was asked for
  at::Tensor input_amax, weight_amax;  ///< FP8 alone, as kernels::fp8_amax() has them; the first may be known
};

/// dy (n, out), and in FP8 its copies.
struct OutputGradient {
  at::Tensor rows;  ///< undefined while they arrive
  kernels::Fp8Matrix plain, columns;
  at::Tensor sums;       ///< over the rows, (out) fp32, where they are known
  at::Tensor mine = {};  ///< this rank's rows of those that arrive
  Arriving arriving = {};

  /// The current stream waits for what arrives.
  Factor factor() {
    if (arriving.pending()) rows = arriving.take();
    return {rows, columns, sums};
  }
};

enum class KeepInput { kNo, kYes };
/// For a function of autograd about to be called; inside of it grad mode is off in any case.
KeepInput keep_for_backward();
/// kNo as well where neither weights nor bias require a gradient: only theirs needs the layer's input.
KeepInput keep_for_backward(at::TensorList weights, const at::Tensor& bias);

/// The values of a linear layer's weight, for other operators to read: the weight itself, or what was lent
/// for it in NF4, decoded.
at::Tensor readable(const at::Tensor& weight);

/// (..., features) -> (n, features)
at::Tensor as_rows(const at::Tensor& x);
/// `rows` with the leading dimensions of `like`. Behind a joint they are more or fewer than its rows: then
/// the last of these dimensions, the length of sequences, is as many times longer or shorter.
at::Tensor shaped(const at::Tensor& rows, const at::Tensor& like);

/// input (n, in) -> (n, sum of out_i), plus `residual` of any shape with as many elements, unless undefined.
/// With a joint before it the input is (n, in) and the output has N rows, with one behind it the other way
/// round. Then it keeps the n rows, not all.
at::Tensor apply_linear(const LinearParams& params, const kernels::Fp8Source& input,
                        const at::Tensor& residual, LinearKept& kept, KeepInput keep,
                        Output output = Output::kRead);
/// The input's factor, of which ranks may still gather the rows.
class ArrivingFactor {
 public:
  explicit ArrivingFactor(Factor factor) : factor_(std::move(factor)) {}
  ArrivingFactor(Arriving rows, std::optional<Fp8Recipe> fp8, at::Tensor input_amax)
      : rows_(std::move(rows)), fp8_(std::move(fp8)), input_amax_(std::move(input_amax)) {}

  Factor take();

 private:
  Factor factor_;
  Arriving rows_;
  std::optional<Fp8Recipe> fp8_;
  at::Tensor input_amax_;
};
/// The input's factor when apply_linear() did not keep it, from the same input; amax as apply_linear() left
/// it. What is computed before it is taken runs beside the gather.
ArrivingFactor begin_input_factor(const LinearParams& params, const kernels::Fp8Source& input,
                                  const at::Tensor& input_amax);
/// The input's factor of what apply_linear() kept.
ArrivingFactor begin_input_factor(const LinearParams& params, const LinearKept& kept);
/// dy (..., out), with what is noted of it (notes.h)
OutputGradient output_gradient(const LinearParams& params, const at::Tensor& dy);
/// dy (n, out)
OutputGradient output_gradient(const LinearParams& params, const kernels::Fp8Source& dy,
                               const at::Tensor& amax = {}, const at::Tensor& sums = {});
/// The gradient of a layer's input, which ranks may still sum up.
class InputGradient {
 public:
  InputGradient() = default;
  explicit InputGradient(at::Tensor whole) : whole_(std::move(whole)) {}
  InputGradient(Arriving sum, at::Tensor addend, at::ScalarType dtype)
      : sum_(std::move(sum)), addend_(std::move(addend)), dtype_(dtype) {}

  at::Tensor take();  ///< (n, in)

 private:
  at::Tensor whole_;
  Arriving sum_;
  at::Tensor addend_;
  at::ScalarType dtype_ = at::kFloat;
};
/// The gradient of the input, plus `addend` of any shape with as many elements, unless undefined. What is
/// computed before it is taken runs beside the sum.
InputGradient begin_input_gradient(const LinearParams& params, const at::Tensor& weight_amax,
                                   OutputGradient& dy, const at::Tensor& addend = {});
inline at::Tensor input_gradient(const LinearParams& params, const at::Tensor& weight_amax,
                                 OutputGradient& dy, const at::Tensor& addend = {}) {
  return begin_input_gradient(params, weight_amax, dy, addend).take();
}
/// Computes the gradients of weights and bias, in lent memory or added to gradients that exist. Returns what
/// backward returns to autograd for each weight and the bias: undefined for gradients that are in place, and
/// for parameters that want none.
torch::autograd::variable_list add_parameter_gradients(const LinearParams& params, const Factor& input,
                                                       const Factor& dy);
/// add_parameter_gradients() for backward functions: now or, under a DeferredGradients::Scope, later; then it
/// returns undefined tensors.
torch::autograd::variable_list deferrable_parameter_gradients(const LinearParams& params, const Factor& input,
                                                              const Factor& dy);

/// Keeps in an autograd context what linear layers need in backward, and restores it there. `saved`: tensors
/// of the function itself.
struct SavedLinear {
  const LinearParams& params;
  const LinearKept& kept;
};
void save(torch::autograd::AutogradContext& context, torch::autograd::variable_list saved,
          std::initializer_list<SavedLinear> linears);
struct RestoredLinear {
  torch::autograd::variable_list weights;
  at::Tensor bias;
  bool in_out = false;
  std::optional<Fp8Recipe> fp8;
  LinearKept kept;
  Joints joints;

  LinearParams params() const { return {weights, bias, in_out, fp8, joints}; }
};
struct Restored {
  torch::autograd::variable_list saved;
  std::vector<RestoredLinear> linears;
};
Restored restore(torch::autograd::AutogradContext& context);
/// Keeps the joints of one layer, the one numbered `index` in the context, and restores them.
void keep_joints(torch::autograd::AutogradContext& context, const Joints& joints, size_t index = 0);
Joints kept_joints(torch::autograd::AutogradContext& context, size_t index = 0);

}  // namespace trireme::nn
