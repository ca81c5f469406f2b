#pragma once
// How linear layers are multiplied in FP8: both operands of each product of forward and backward are cast
// from bf16, with scales from their own largest magnitudes or, delayed, from those of earlier steps; sums,
// outputs, weights and gradients stay as they are.
#include <ATen/core/Tensor.h>

#include "trireme/kernels/fp8.h"
#include "trireme/plan/block_layer.h"

namespace trireme::nn {

using plan::BlockLayer;
using plan::kBlockLayers;

/// Delayed scaling of a layer, or of all layers of a block one after another. Each tensor has, in fp32,
/// kMagnitudes values a layer: the magnitude of inputs, of gradients of outputs, and of weights.
struct Fp8Layer {
  static constexpr int64_t kMagnitudes = 3;
  at::Tensor amax;  ///< to scale by; undefined: scales come from the cast values
  at::Tensor seen;  ///< raised by the casts of a step; undefined: scaling is not delayed

  Fp8Layer at(BlockLayer layer) const;
  at::Tensor input_amax() const { return one_of(amax, 0); }
  at::Tensor gradient_amax() const { return one_of(amax, 1); }
  at::Tensor weight_amax() const { return one_of(amax, 2); }
  at::Tensor input_seen() const { return one_of(seen, 0); }
  at::Tensor gradient_seen() const { return one_of(seen, 1); }
  at::Tensor weight_seen() const { return one_of(seen, 2); }

 private:
  static at::Tensor one_of(const at::Tensor& magnitudes, int64_t which);
};

struct Fp8Recipe {
  kernels::Fp8Scaling scaling = kernels::Fp8Scaling::kTensor;
  kernels::Fp8Format gradients = kernels::Fp8Format::kE4m3;  ///< of outputs; all else is e4m3
  bool fast_forward = true, fast_backward = false;           ///< as fp8_matmul() has it
  Fp8Layer layer = {};
};

}  // namespace trireme::nn
