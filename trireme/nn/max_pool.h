#pragma once
#include <ATen/core/Tensor.h>

namespace trireme::nn {

/// The largest value of each window of kernel x kernel: x (B, C, H, W) -> (B, C, H', W'), as at::max_pool2d
/// has it. Channels-last images on a GPU go through kernels of our own (kernels/max_pool.cu), which repeat
/// their bits and keep a byte for each output.
at::Tensor max_pool(const at::Tensor& x, int64_t kernel, int64_t stride, int64_t padding);

}  // namespace trireme::nn
