#pragma once
// Element-wise activations with their derivatives, on the CPU. Scalar is float or c10::BFloat16; arithmetic
// is fp32.
#include <cstdint>

namespace trireme::kernels {

/// SwiGLU (Shazeer 2020): input (rows, 2*width) holds gate | up; y (rows, width) = silu(gate) * up.
template <typename Scalar>
void swiglu_forward(Scalar* y, const Scalar* gate_up, int64_t rows, int64_t width);
/// d_gate_up (rows, 2*width) is written; it may be gate_up itself.
template <typename Scalar>
void swiglu_backward(Scalar* d_gate_up, const Scalar* dy, const Scalar* gate_up, int64_t rows, int64_t width);

/// GELU in the tanh form of GPT-2 (Hendrycks and Gimpel 2016).
template <typename Scalar>
void gelu_forward(Scalar* y, const Scalar* x, int64_t count);
/// dx may be dy or x itself.
template <typename Scalar>
void gelu_backward(Scalar* dx, const Scalar* dy, const Scalar* x, int64_t count);

}  // namespace trireme::kernels
