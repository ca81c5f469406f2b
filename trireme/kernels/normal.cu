#include <algorithm>

#include "trireme/kernels/normal.h"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 4096;

template <typename Value, typename Draw>
__global__ void draw_kernel(Value* out, int64_t count, Counters at, Draw draw) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += stride)
    out[i] = draw(at.of(i));
}

template <typename Value, typename Draw>
int fill(Value* out, int64_t count, const Counters& at, const Draw& draw, void* stream) {
  if (count == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>((count + kThreads - 1) / kThreads, kMaxBlocks));
  draw_kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(out, count, at, draw);
  return cudaGetLastError();
}

}  // namespace

int fill_normal(float* out, int64_t count, uint64_t key, const Counters& at, double deviation, void* stream) {
  return fill(out, count, at, NormalDraw{key, deviation}, stream);
}

int fill_kept(bool* out, int64_t count, uint64_t key, const Counters& at, double p, void* stream) {
  return fill(out, count, at, KeptDraw{key, p}, stream);
}

}  // namespace trireme::kernels::cuda
