#pragma once
// How linear layers are multiplied in FP8: both operands of each product of forward and backward are cast
// from bf16, with scales from their own largest magnitudes; sums, outputs, weights and gradients stay as they
// are.
#include "trireme/kernels/fp8.h"

namespace trireme::nn {

struct Fp8Recipe {
  kernels::Fp8Scaling scaling = kernels::Fp8Scaling::kTensor;
  kernels::Fp8Format gradients = kernels::Fp8Format::kE4m3;  ///< of outputs; all else is e4m3
  bool fast_forward = true, fast_backward = false;           ///< as fp8_matmul() has it

  bool operator==(const Fp8Recipe&) const = default;
};

}  // namespace trireme::nn
