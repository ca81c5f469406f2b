// Gradients of rows of a table, summed per token in two steps, so that a frequent token is the work of many
// blocks: blocks sum windows of the sorted positions, then the sums of runs that reach over several windows
// are added up.
#include <algorithm>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kWindow = 64;
constexpr int kMaxThreads = 256;
constexpr int64_t kNoToken = -1;

int64_t window_count(int64_t count) {
  return (count + kWindow - 1) / kWindow;
}

// A run is the sorted positions of one token. Where it reaches over several windows, each window's part of
// its sum is a row of the scratch memory, two rows a window: the head belongs to a run that began in an
// earlier window, the tail to one that begins here and continues in the next.

__device__ int64_t head_row(int64_t window) {
  return 2 * window;
}
__device__ int64_t tail_row(int64_t window) {
  return 2 * window + 1;
}

/// Sums of parts that one access moves, where the lanes of the table are kLanes.
template <int kLanes>
constexpr int kPartLanes = std::min(kLanes, kFullPack<float>);

template <int kLanes>
__device__ void store_part(float* to, const float (&sums)[kLanes]) {
#pragma unroll
  for (int j = 0; j < kLanes; j += kPartLanes<kLanes>) {
    Pack<float, kPartLanes<kLanes>> pack;
    for (int k = 0; k < kPartLanes<kLanes>; ++k) pack.set(k, sums[j + k]);
    pack.store(to + j);
  }
}

/// A block sums the runs of one window, for one tile of columns, in rising order. A run that lies in the
/// window is added to dweight; of any other, the part in the window is stored.
template <int kLanes, typename Scalar, typename Sum>
__global__ void __launch_bounds__(kMaxThreads)
    sum_windows(Sum* __restrict__ dweight, float* __restrict__ parts, const Scalar* __restrict__ dy,
                const int64_t* __restrict__ sorted, const int64_t* __restrict__ order, int64_t count,
                int64_t width) {
  constexpr int kInFlight = 8;
  __shared__ int64_t around[kWindow + 2];  // the tokens of the window, the one before it and the one after it
  __shared__ int64_t rows[kWindow];
  const int64_t* tokens = around + 1;
  const int64_t window = blockIdx.x, start = window * kWindow;
  const int length = static_cast<int>(min(count - start, int64_t{kWindow}));
  for (int i = threadIdx.x; i < length + 2; i += blockDim.x) {
    const int64_t at = start + i - 1;
    around[i] = at >= 0 && at < count ? sorted[at] : kNoToken;
    if (i < length) rows[i] = order[start + i];
  }
  __syncthreads();
  const int64_t column = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * kLanes;
  if (column >= width) return;

  float sums[kLanes] = {};
  bool in_head = tokens[-1] == tokens[0];
  for (int first = 0; first < length; first += kInFlight) {
    RawPack<Scalar, kLanes> values[kInFlight];
    RawPack<Sum, kLanes> targets[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u;
      if (i >= length) break;
      values[u].load_streaming(dy + rows[i] * width + column);
      // Where a run ends, its row of dweight is on its way together with the rows of dy.
      if (tokens[i] != tokens[i + 1]) targets[u].load(dweight + tokens[i] * width + column);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int i = first + u;
      if (i >= length) break;
      const auto value = values[u].pack();
      for (int j = 0; j < kLanes; ++j) sums[j] += value[j];
      if (tokens[i] == tokens[i + 1]) continue;
      if (in_head) {
        store_part(parts + head_row(window) * width + column, sums);
        in_head = false;
      } else {
        auto total = targets[u].pack();
        for (int j = 0; j < kLanes; ++j) total.set(j, total[j] + sums[j]);
        total.store(dweight + tokens[i] * width + column);
      }
      for (int j = 0; j < kLanes; ++j) sums[j] = 0.0f;
    }
  }
  if (tokens[length - 1] == tokens[length]) {
    store_part(parts + (in_head ? head_row(window) : tail_row(window)) * width + column, sums);
  }
}

constexpr int kTileColumns = 32;  // packs of a row
constexpr int kTileRows = 8;
constexpr int kTileThreads = kTileColumns * kTileRows;

/// The block of a window adds up the run that begins in it and goes on, if there is one, for one tile of
/// columns: the tail of this window and the heads of those after it. The thread rows take every kTileRows-th
/// of these parts, then their sums are added in rising order.
template <int kLanes, typename Sum>
__global__ void __launch_bounds__(kTileThreads)
    add_parts(Sum* __restrict__ dweight, const float* __restrict__ parts, const int64_t* __restrict__ sorted,
              int64_t count, int64_t width) {
  __shared__ float sums[kTileRows][kTileColumns][kLanes];
  const int64_t window = blockIdx.x, start = window * kWindow, next = start + kWindow;
  const int64_t token = sorted[next];
  const bool goes_on = sorted[next - 1] == token, begins_before = start > 0 && sorted[start - 1] == token;
  if (!goes_on || begins_before) return;
  const int x = threadIdx.x, y = threadIdx.y, thread = y * kTileColumns + x;

  int64_t windows = 1;
  for (int more = kTileThreads; more == kTileThreads; windows += more) {
    const int64_t at = (window + windows + thread) * kWindow;
    more = __syncthreads_count(at < count && sorted[at] == token);
  }

  const int64_t column = (static_cast<int64_t>(blockIdx.y) * kTileColumns + x) * kLanes;
  float sum[kLanes] = {};
  if (column < width) {
#pragma unroll 4
    for (int64_t k = y; k < windows; k += kTileRows) {
      Pack<float, kLanes> part;
      part.load(parts + (k == 0 ? tail_row(window) : head_row(window + k)) * width + column);
      for (int j = 0; j < kLanes; ++j) sum[j] += part[j];
    }
  }
  for (int j = 0; j < kLanes; ++j) sums[y][x][j] = sum[j];
  __syncthreads();
  if (y > 0 || column >= width) return;
  for (int r = 1; r < kTileRows; ++r) {
    for (int j = 0; j < kLanes; ++j) sum[j] += sums[r][x][j];
  }
  Pack<Sum, kLanes> total;
  total.load(dweight + token * width + column);
  for (int j = 0; j < kLanes; ++j) total.set(j, total[j] + sum[j]);
  total.store(dweight + token * width + column);
}

template <int kLanes, typename Scalar, typename Sum>
int launch(Sum* dweight, float* scratch, const Scalar* dy, const int64_t* sorted, const int64_t* order,
           int64_t count, int64_t width, cudaStream_t stream) {
  const int64_t windows = window_count(count), packs = (width + kLanes - 1) / kLanes;
  const int64_t tiles = (packs + kMaxThreads - 1) / kMaxThreads;
  const int64_t threads = ((packs + tiles - 1) / tiles + 31) / 32 * 32;
  const dim3 blocks(static_cast<unsigned>(windows), static_cast<unsigned>(tiles));
  sum_windows<kLanes><<<blocks, static_cast<unsigned>(threads), 0, stream>>>(dweight, scratch, dy, sorted,
                                                                             order, count, width);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || windows == 1) return error;

  constexpr int64_t kTileWidth = kTileColumns * kPartLanes<kLanes>;
  const dim3 runs(static_cast<unsigned>(windows - 1),  // no run goes on after the last window
                  static_cast<unsigned>((width + kTileWidth - 1) / kTileWidth));
  add_parts<kPartLanes<kLanes>>
      <<<runs, dim3(kTileColumns, kTileRows), 0, stream>>>(dweight, scratch, sorted, count, width);
  return cudaGetLastError();
}

}  // namespace

int embedding_backward(void* dweight, Dtype dweight_dtype, float* scratch, const void* dy,
                       const int64_t* sorted, const int64_t* order, int64_t count, int64_t width, Dtype dtype,
                       void* stream) {
  if (count == 0 || width == 0) return cudaSuccess;
  return dispatch_sum(dtype, dweight_dtype, [&](auto scalar, auto sum) {
    using Scalar = decltype(scalar);
    using Sum = decltype(sum);
    auto* to = static_cast<Sum*>(dweight);
    const auto* from = static_cast<const Scalar*>(dy);
    return packs({dweight, scratch, dy}, width * sizeof(Scalar))
               ? launch<kFullPack<Sum>>(to, scratch, from, sorted, order, count, width, as_stream(stream))
               : launch<1>(to, scratch, from, sorted, order, count, width, as_stream(stream));
  });
}

int64_t embedding_scratch(int64_t count, int64_t width) {
  return 2 * window_count(count) * width;
}

}  // namespace trireme::kernels::cuda
