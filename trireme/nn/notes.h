#pragma once
// Notes of the kernel that wrote an activation or a gradient: its largest magnitude, which casts to FP8 need,
// and the sums over its columns, which are the gradient of a bias. They go with the tensor to the linear
// layer, which then need not read it a second time.
#include <ATen/core/Tensor.h>

#include <optional>

#include "trireme/nn/fp8.h"

namespace trireme::nn {

/// Whether casts need the largest magnitude: not without FP8, nor with scales of rows or blocks or from
/// earlier steps.
bool asks_for_amax(const std::optional<Fp8Recipe>& fp8);

/// (1) fp32 zero for the kernel that writes `output` to raise (kernels/tensor_ops.h). Undefined where nobody
/// asks, and on a CPU, whose kernels do not look.
at::Tensor amax_to_raise(const at::Tensor& output, bool asked);

/// `amax` is the largest magnitude of what `tensor` holds now; undefined: it is not known.
void note_amax(const at::Tensor& tensor, at::Tensor amax);
/// `alias` is another tensor with the values of `tensor`, and has the largest magnitude that is known of it.
void pass_on_amax(const at::Tensor& alias, const at::Tensor& tensor);
/// Undefined: casts do not need it, it is not known, or something wrote to the tensor since.
at::Tensor noted_amax(const at::Tensor& tensor, const std::optional<Fp8Recipe>& fp8);

/// A linear layer asks whoever uses its output to note the column sums of the gradient that it returns. A
/// note is lost where a block is computed again or a pipeline is cut, so those of LayerNorm, which may be on
/// the other side, have the bits that kernels::add_column_sums() would find.
void ask_for_gradient_sums(const at::Tensor& output);
bool asks_for_gradient_sums(const at::Tensor& input);

/// Memory (width of `gradient`), fp32, that the kernel which writes `gradient` fills with its sums. Undefined
/// where nobody asks, where there are no rows, and on a CPU, whose kernels do not look.
at::Tensor sums_to_fill(const at::Tensor& gradient, bool asked);

/// `sums` are those over the columns of what `tensor` holds now; undefined: they are not known.
void note_column_sums(const at::Tensor& tensor, at::Tensor sums);
/// Undefined: they are not known, or something wrote to the tensor since.
at::Tensor noted_column_sums(const at::Tensor& tensor);

}  // namespace trireme::nn
