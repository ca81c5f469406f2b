#include <algorithm>
#include <cstdint>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 2048;
constexpr int kUnroll = 4;  // packs of a thread in flight

template <typename Scalar, typename Sum, int kLanes, bool kAdds>
__global__ void scale_kernel(Sum* y, const Scalar* x, const float* factor, int64_t packs) {
  const float f = *factor;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < packs;
       first += kUnroll * stride) {
    RawPack<Scalar, kLanes> in[kUnroll];
    Pack<Sum, kLanes> out[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * stride;
      if (i >= packs) break;
      in[u].load_streaming(x + i * kLanes);
      if constexpr (kAdds) out[u].load(y + i * kLanes);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = first + u * stride;
      if (i >= packs) break;
      const Pack<Scalar, kLanes> values = in[u].pack();
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        out[u].set(lane, kAdds ? fmaf(f, values[lane], out[u][lane]) : f * values[lane]);
      }
      out[u].store(y + i * kLanes);
    }
  }
}

template <typename Scalar, typename Sum, int kLanes, bool kAdds>
void launch(Sum* y, const Scalar* x, const float* factor, int64_t count, cudaStream_t stream) {
  const int64_t packs = count / kLanes;
  const int64_t wanted = (packs + kThreads * kUnroll - 1) / (kThreads * kUnroll);
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, kMaxBlocks));
  scale_kernel<Scalar, Sum, kLanes, kAdds><<<blocks, kThreads, 0, stream>>>(y, x, factor, packs);
}

}  // namespace

int scale(void* y, Dtype y_dtype, const void* x, const float* factor, bool adds, int64_t count, Dtype dtype,
          void* stream) {
  if (count == 0) return cudaSuccess;
  return dispatch_sum(dtype, y_dtype, [&](auto scalar, auto sum) {
    using Scalar = decltype(scalar);
    using Sum = decltype(sum);
    constexpr int kFull = kFullPack<Sum>;
    const bool full = packs({y, x}, count * static_cast<int64_t>(sizeof(Scalar)));
    auto* const to = static_cast<Sum*>(y);
    const auto* const from = static_cast<const Scalar*>(x);
    if (adds) {
      full ? launch<Scalar, Sum, kFull, true>(to, from, factor, count, as_stream(stream))
           : launch<Scalar, Sum, 1, true>(to, from, factor, count, as_stream(stream));
    } else {
      full ? launch<Scalar, Sum, kFull, false>(to, from, factor, count, as_stream(stream))
           : launch<Scalar, Sum, 1, false>(to, from, factor, count, as_stream(stream));
    }
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace trireme::kernels::cuda
