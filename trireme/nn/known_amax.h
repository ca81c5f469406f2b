#pragma once
// The largest magnitude of an activation or a gradient goes with it, from the kernel that wrote it to the
// linear layer that casts it to FP8, so that nobody reads the tensor a second time to find it.
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
/// Undefined: casts do not need it, it is not known, or something wrote to the tensor since.
at::Tensor noted_amax(const at::Tensor& tensor, const std::optional<Fp8Recipe>& fp8);

}  // namespace trireme::nn
