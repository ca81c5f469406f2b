#pragma once
// SwiGLU of one element, for kernels that write it and kernels that cast it. Device code only; included by
// .cu files.
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {

template <typename Scalar>
__device__ float sigmoid(float x) {
  float reciprocal;  // within one ulp
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(1.0f + exponential<Scalar>(-x)));
  return reciprocal;
}

// Functions of kInputs elements. kPacks: packs that a thread takes of each of them, so many that enough loads
// are in flight. A backward may also give what the forward gave, after kGradients gradients.

/// y = silu(gate) * up.
template <typename Scalar>
struct SwigluForward {
  static constexpr int kInputs = 2, kOutputs = 1, kGradients = 1, kPacks = 1;
  static __device__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    const auto& [gate, up] = in;
    out[0] = gate * sigmoid<Scalar>(gate) * up;
  }
};

/// (d_gate, d_up), and y where kAgain, from (gate, up, dy).
template <typename Scalar, bool kAgain = false>
struct SwigluBackward {
  static constexpr int kInputs = 3, kGradients = 2, kOutputs = kGradients + kAgain, kPacks = 1;
  static __device__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    const auto& [gate, up, dy] = in;
    const float s = sigmoid<Scalar>(gate);
    out[0] = dy * up * s * (1.0f + gate * (1.0f - s));
    out[1] = dy * gate * s;
    if constexpr (kAgain) out[2] = gate * s * up;
  }
};

/// Function on each lane of kInputs packs.
template <typename Function, typename Scalar, int kLanes>
__device__ void map_pack(const RawPack<Scalar, kLanes> (&raw)[Function::kInputs],
                         Pack<Scalar, kLanes> (&out)[Function::kOutputs]) {
  Pack<Scalar, kLanes> in[Function::kInputs];
#pragma unroll
  for (int i = 0; i < Function::kInputs; ++i) in[i] = raw[i].pack();
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    float x[Function::kInputs], y[Function::kOutputs];
#pragma unroll
    for (int i = 0; i < Function::kInputs; ++i) x[i] = in[i][lane];
    Function::apply(x, y);
#pragma unroll
    for (int i = 0; i < Function::kOutputs; ++i) out[i].set(lane, y[i]);
  }
}

}  // namespace trireme::kernels::cuda
