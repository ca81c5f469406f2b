#pragma once
// Sums over the columns of a matrix, in two steps: many walkers each sum some of the rows into a partial row
// of scratch memory, then a second kernel sums the partial rows. Device code only; included by .cu files.
#include <algorithm>

#include "trireme/kernels/norm.cuh"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {

constexpr int kSms = 132;  // a constant, so that the order of sums does not depend on the GPU

/// sums += every step-th row from `first` on, of the kLanes columns that `x` points at.
template <int kLanes, typename Scalar>
__device__ void add_rows(float (&sums)[kLanes], const Scalar* __restrict__ x, int64_t first, int64_t rows,
                         int64_t step, int width) {
  constexpr int kInFlight = 8;
  for (int64_t row = first; row < rows; row += kInFlight * step) {
    RawPack<Scalar, kLanes> values[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (row + u * step < rows) values[u].load(x + (row + u * step) * width);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (row + u * step >= rows) break;
      const auto value = values[u].pack();
      for (int j = 0; j < kLanes; ++j) sums[j] += value[j];
    }
  }
}

/// Destinations of the sums of partial rows: the first kinds of sums are added to gradients, the next one
/// overwrites an fp32 array.
template <typename Scalar>
struct ColumnTotals {
  Scalar* gradients[2] = {};
  int gradient_count = 0;
  float* sums = nullptr;

  unsigned kinds() const { return gradient_count + (sums != nullptr); }
};

constexpr int kTileColumns = 8;  // 32 bytes of each partial row
constexpr int kTileRows = 64;
constexpr int kTileThreads = kTileColumns * kTileRows;

/// partial: (kinds, rows, width)
template <typename Scalar>
__global__ void __launch_bounds__(kTileThreads)
    add_partial_rows(ColumnTotals<Scalar> totals, const float* partial, int rows, int width) {
  __shared__ float sums[kTileRows][kTileColumns];
  const int x = threadIdx.x, y = threadIdx.y, kind = blockIdx.y;
  const int column = blockIdx.x * kTileColumns + x;
  float sum[1] = {};
  if (column < width) {
    add_rows(sum, partial + static_cast<int64_t>(kind) * rows * width + column, y, rows, kTileRows, width);
  }
  sums[y][x] = sum[0];
  for (int half = kTileRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (y < half) sums[y][x] += sums[y + half][x];
  }
  if (y > 0 || column >= width) return;
  if (kind == totals.gradient_count) {
    totals.sums[column] = sums[0][x];
  } else {
    Scalar& total = totals.gradients[kind][column];
    total = from_float<Scalar>(to_float(total) + sums[0][x]);
  }
}

template <typename Scalar>
int launch_add_partial_rows(const ColumnTotals<Scalar>& totals, const float* partial, int rows, int width,
                            cudaStream_t stream) {
  const dim3 blocks((width + kTileColumns - 1) / kTileColumns, totals.kinds());
  add_partial_rows<<<blocks, dim3(kTileColumns, kTileRows), 0, stream>>>(totals, partial, rows, width);
  return cudaGetLastError();
}

/// Rows in work at once on the whole GPU: kMaxThreads threads on each SM, as many of them for a row as its
/// packs keep busy.
constexpr int walkers_for(int64_t packs) {
  return kSms * kMaxThreads / threads_for(packs);
}

/// Depends on width and dtype alone: whoever sums columns with so many walkers adds in the same order.
template <typename Scalar>
constexpr int walkers_of(int64_t width) {
  return walkers_for((width + kFullPack<Scalar> - 1) / kFullPack<Scalar>);
}

/// The largest walkers_of() over all dtypes: that of the one whose rows have fewest packs.
constexpr int64_t most_walkers(int64_t width) {
  return walkers_for((width + 7) / 8);
}

// A grid of blocks that walk down columns: each thread has one pack of a row, and every walkers-th row.

constexpr int kColumnThreads = 32;  // packs of a row
constexpr int kColumnRows = 8;
constexpr int kColumnBlock = kColumnThreads * kColumnRows;

/// For packs of kLanes elements. Its last row of blocks may have threads for more than `walkers`.
template <int kLanes>
dim3 column_grid(int64_t walkers, int width) {
  const int packs = (width + kLanes - 1) / kLanes;
  return dim3((packs + kColumnThreads - 1) / kColumnThreads, (walkers + kColumnRows - 1) / kColumnRows);
}

/// For functions of two operands, whose loads take the registers of more walkers: some 512 threads on each
/// SM, in whole blocks.
constexpr int64_t walkers_of_two(int64_t packs) {
  const int64_t walkers = std::clamp<int64_t>(kSms * 512 / packs, 1, 1024);
  return (walkers + kColumnRows - 1) / kColumnRows * kColumnRows;
}

}  // namespace trireme::kernels::cuda
