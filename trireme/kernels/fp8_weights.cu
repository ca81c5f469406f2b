// Parts of weights in FP8: fp32 counts as rounded to bf16, so that the bytes are those of a cast from bf16.
#include <cstdint>

#include "trireme/kernels/amax.cuh"
#include "trireme/kernels/fp8_bytes.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 8;
constexpr unsigned kInfinity = 0x7f800000u;

/// kLanes elements, rounded to bf16.
struct Rounded {
  float values[kLanes];

  __device__ explicit Rounded(const float* x) {
    const float4 first = *reinterpret_cast<const float4*>(x),
                 second = *reinterpret_cast<const float4*>(x + 4);
    const float all[kLanes] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = __bfloat162float(__float2bfloat16_rn(all[lane]));
  }
  /// The largest magnitude, as bits of fp32.
  __device__ unsigned largest_bits() const {
    unsigned most = 0;
#pragma unroll
    for (const float value : values) most = larger(most, __float_as_uint(fabsf(value)));
    return most;
  }
};

template <typename Visit>
__device__ void visit_packs(const float* x, int64_t packs, const Visit& visit) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step)
    visit(i, Rounded(x + i * kLanes));
}

__global__ void __launch_bounds__(kThreads) amax_of_part(float* out, const float* x, int64_t packs) {
  unsigned most = 0;
  visit_packs(x, packs, [&](int64_t, const Rounded& pack) { most = larger(most, pack.largest_bits()); });
  most = __reduce_max_sync(0xffffffffu, most);
  if (threadIdx.x % 32 == 0) raise(out, most);
}

template <bool kSees>
__global__ void __launch_bounds__(kThreads) cast_part(uint2* bytes, const float* x, const float* amax,
                                                      float* seen, int64_t packs, float largest_value) {
  const float by = largest_value / counted(*amax);
  unsigned most = 0;
  visit_packs(x, packs, [&](int64_t i, const Rounded& pack) {
    const unsigned of_pack = kSees ? pack.largest_bits() : 0;
    most = larger(most, of_pack);
    const float factor = of_pack < kInfinity ? by : __uint_as_float(0x7fffffffu);
    const auto v = [&](int lane) { return pack.values[lane] * factor; };
    bytes[i] =
        make_uint2(word_of<__NV_E4M3>(v(0), v(1), v(2), v(3)), word_of<__NV_E4M3>(v(4), v(5), v(6), v(7)));
  });
  if constexpr (kSees) {
    most = __reduce_max_sync(0xffffffffu, most);
    if (threadIdx.x % 32 == 0) raise(seen, most);
  }
}

/// Enough loads in flight on the largest GPUs.
unsigned blocks_for(int64_t packs) {
  constexpr int64_t kMostBlocks = 132 * 8;
  const int64_t needed = (packs + kThreads - 1) / kThreads;
  return static_cast<unsigned>(needed < kMostBlocks ? needed : kMostBlocks);
}

}  // namespace

int fp8_amax_part(float* out, const float* x, int64_t count, void* stream) {
  if (count == 0) return cudaSuccess;
  const int64_t packs = count / kLanes;
  amax_of_part<<<blocks_for(packs), kThreads, 0, as_stream(stream)>>>(out, x, packs);
  return cudaGetLastError();
}

int fp8_cast_part(void* bytes, const float* x, const float* amax, float* seen, int64_t count, void* stream) {
  if (count == 0) return cudaSuccess;
  const int64_t packs = count / kLanes;
  const auto kernel = seen == nullptr ? cast_part<false> : cast_part<true>;
  kernel<<<blocks_for(packs), kThreads, 0, as_stream(stream)>>>(static_cast<uint2*>(bytes), x, amax, seen,
                                                                packs, largest(Fp8Format::kE4m3));
  return cudaGetLastError();
}

}  // namespace trireme::kernels::cuda
