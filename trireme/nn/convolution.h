#pragma once
// Convolutions of images. Parameters lie contiguous in the flat buffers of the engine, whereas cuDNN wants
// the weights of channels-last images channels-last.
#include <ATen/core/Tensor.h>

namespace trireme::nn {

/// at::conv2d(x, weight): x (B, C, H, W), weight (out, C, kernel, kernel). For channels-last images on a GPU
/// the weight is turned once for both passes, and its gradient is turned where it is added; that throws
/// LogicError from a backward pass that is to be differentiated itself.
at::Tensor conv2d(const at::Tensor& x, const at::Tensor& weight, int64_t stride, int64_t padding);

}  // namespace trireme::nn
