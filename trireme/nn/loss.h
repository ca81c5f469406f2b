#pragma once
#include <ATen/core/Tensor.h>

namespace trireme::nn {

/// Mean cross-entropy in nats over all rows: logits (..., V), targets (...) int64 -> scalar fp32. The logits
/// are consumed: on a CPU their memory becomes the gradient.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets);

}  // namespace trireme::nn
