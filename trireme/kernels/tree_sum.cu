#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "trireme/kernels/tree_sum.h"

namespace trireme::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;
constexpr int kLevels = 32;  // depth of the tree for up to 2^32 ranks

template <typename Value>
struct Pack {};
template <>
struct Pack<float> {
  using Type = float4;
  static __device__ float4 widen(const float4& v) { return v; }
};
template <>
struct Pack<uint16_t> {
  using Type = uint2;
  static __device__ float4 widen(const uint2& v) {
    return make_float4(__uint_as_float(v.x << 16), __uint_as_float(v.x & 0xffff0000u),
                       __uint_as_float(v.y << 16), __uint_as_float(v.y & 0xffff0000u));
  }
};

__device__ float widen(float value) {
  return value;
}
__device__ float widen(uint16_t bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}

__device__ float add(float a, float b) {
  return a + b;
}
__device__ float4 add(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

template <typename Load>
using Sum = decltype(std::declval<Load>()(0));

/// The tree in registers for a power of two rows; `load(r)` reads row r. The loads are independent, so that
/// all of them are in flight together.
template <int kRows, typename Load>
__device__ Sum<Load> tree(const Load& load, int first) {
  if constexpr (kRows == 1) {
    return load(first);
  } else {
    return add(tree<kRows / 2>(load, first), tree<kRows / 2>(load, first + kRows / 2));
  }
}

/// The tree for any number of rows: partial sums of 2^k rows are merged as a binary counter carries.
template <typename Load>
__device__ Sum<Load> tree_of_many(const Load& load, int rows) {
  Sum<Load> partial[kLevels];
  int depth = 0;
  for (int r = 0; r < rows; ++r) {
    Sum<Load> sum = load(r);
    for (int carry = r; carry & 1; carry >>= 1) sum = add(partial[--depth], sum);
    partial[depth++] = sum;
  }
  Sum<Load> sum = partial[--depth];
  while (depth > 0) sum = add(partial[--depth], sum);
  return sum;
}

template <int kRows, typename Load>
__device__ Sum<Load> sum_rows(const Load& load, int rows) {
  if constexpr (kRows == 0) {
    return tree_of_many(load, rows);
  } else {
    return tree<kRows>(load, 0);
  }
}

/// kRows = 0: any number of rows. count is in packs of four elements.
template <int kRows, typename Value>
__global__ void sum_packs(float4* out, const typename Pack<Value>::Type* rows, int ranks, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    out[i] = sum_rows<kRows>([&](int r) { return Pack<Value>::widen(rows[r * count + i]); }, ranks);
  }
}

template <int kRows, typename Value>
__global__ void sum_elements(float* out, const Value* rows, int ranks, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    out[i] = sum_rows<kRows>([&](int r) { return widen(rows[r * count + i]); }, ranks);
  }
}

template <int kRows, typename Value>
cudaError_t launch(float* out, const Value* rows, int ranks, int64_t count, cudaStream_t stream) {
  using PackType = typename Pack<Value>::Type;
  const auto address = reinterpret_cast<uintptr_t>(out) | reinterpret_cast<uintptr_t>(rows);
  const bool packed = count % 4 == 0 && address % sizeof(float4) == 0;
  const int64_t items = packed ? count / 4 : count;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((items + kThreads - 1) / kThreads, kMaxBlocks));
  if (packed) {
    sum_packs<kRows, Value><<<blocks, kThreads, 0, stream>>>(
        reinterpret_cast<float4*>(out), reinterpret_cast<const PackType*>(rows), ranks, items);
  } else {
    sum_elements<kRows, Value><<<blocks, kThreads, 0, stream>>>(out, rows, ranks, items);
  }
  return cudaGetLastError();
}

template <typename Value>
cudaError_t launch_for(float* out, const Value* rows, int64_t ranks, int64_t count, void* stream) {
  if (count == 0) return cudaSuccess;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int n = static_cast<int>(ranks);
  switch (n) {
    case 2:
      return launch<2>(out, rows, n, count, cuda_stream);
    case 4:
      return launch<4>(out, rows, n, count, cuda_stream);
    case 8:
      return launch<8>(out, rows, n, count, cuda_stream);
    default:
      return launch<0>(out, rows, n, count, cuda_stream);
  }
}

}  // namespace

int tree_sum_cuda(float* out, const float* rows, int64_t ranks, int64_t count, void* stream) {
  return launch_for(out, rows, ranks, count, stream);
}

int tree_sum_bf16_cuda(float* out, const uint16_t* rows, int64_t ranks, int64_t count, void* stream) {
  return launch_for(out, rows, ranks, count, stream);
}

}  // namespace trireme::kernels
