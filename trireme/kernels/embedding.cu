// Gradients of rows of a table, summed per token.
#include <algorithm>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

// One block sums one run of equal tokens for one tile of columns. A frequent token waits for the
// latency of its rows and little else, so that many small packs in flight serve it better than a few large
// ones.

constexpr int kLanesOfAThread = 4;
constexpr int kMaxThreads = 256;

/// The end of the run of equal tokens that starts at i: steps that double, then a binary search in the last
/// one.
__device__ int64_t run_end(const int64_t* __restrict__ sorted, int64_t i, int64_t count) {
  const int64_t token = sorted[i];
  int64_t inside = i, step = 1;
  while (inside + step < count && sorted[inside + step] == token) {
    inside += step;
    step *= 2;
  }
  int64_t outside = min(inside + step, count);
  while (outside - inside > 1) {
    const int64_t middle = (inside + outside) / 2;
    (sorted[middle] == token ? inside : outside) = middle;
  }
  return outside;
}

/// A block for every position; all but those at the first of a run leave at once. The lanes of a warp read
/// the row numbers together and hand them around.
template <int kLanes, typename Scalar>
__global__ void __launch_bounds__(kMaxThreads)
    sum_runs(Scalar* __restrict__ dweight, const Scalar* __restrict__ dy, const int64_t* __restrict__ sorted,
             const int64_t* __restrict__ order, int64_t count, int64_t width) {
  constexpr int kInFlight = 16;
  const int64_t start = blockIdx.x;
  const int64_t token = sorted[start];
  if (start > 0 && sorted[start - 1] == token) return;
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kLanes;
  const bool inside = column < width;
  const int lane = threadIdx.x % 32;

  Scalar* to = dweight + token * width + column;
  Pack<Scalar, kLanes> total;
  if (inside) total.load(to);
  float sums[kLanes] = {};
  const int64_t end = run_end(sorted, start, count);
  int64_t ahead = order[min(start + lane, end - 1)];
  for (int64_t first = start; first < end; first += kInFlight) {
    const int64_t row = ahead;  // of the lane-th of the next positions
    ahead = order[min(first + kInFlight + lane, end - 1)];
    RawPack<Scalar, kLanes> rows[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + u >= end) break;
      const Scalar* from = dy + __shfl_sync(0xffffffffu, row, u) * width + column;
      if (inside) rows[u].load(from);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (first + u >= end) break;
      const auto values = rows[u].pack();
      for (int j = 0; j < kLanes; ++j) sums[j] += values[j];
    }
  }
  if (!inside) return;
  for (int j = 0; j < kLanes; ++j) total.set(j, total[j] + sums[j]);
  total.store(to);
}

template <int kLanes, typename Scalar>
int launch_sum_runs(Scalar* dweight, const Scalar* dy, const int64_t* sorted, const int64_t* order,
                    int64_t count, int64_t width, cudaStream_t stream) {
  const int64_t packs = (width + kLanes - 1) / kLanes;
  const int64_t threads = std::min<int64_t>((packs + 31) / 32 * 32, kMaxThreads);
  const dim3 blocks(static_cast<unsigned>(count), static_cast<unsigned>((packs + threads - 1) / threads));
  sum_runs<kLanes>
      <<<blocks, static_cast<unsigned>(threads), 0, stream>>>(dweight, dy, sorted, order, count, width);
  return cudaGetLastError();
}

}  // namespace

int embedding_backward(void* dweight, const void* dy, const int64_t* sorted, const int64_t* order,
                       int64_t count, int64_t width, Dtype dtype, void* stream) {
  if (count == 0 || width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    auto* to = static_cast<Scalar*>(dweight);
    const auto* from = static_cast<const Scalar*>(dy);
    return packs({dweight, dy}, width * sizeof(Scalar))
               ? launch_sum_runs<kLanesOfAThread>(to, from, sorted, order, count, width, as_stream(stream))
               : launch_sum_runs<1>(to, from, sorted, order, count, width, as_stream(stream));
  });
}

}  // namespace trireme::kernels::cuda
