// Gradients of RMSNorm and LayerNorm, and sums over columns. Gradients of weights are summed in two steps:
// many walkers each sum some of the rows into a partial row of the scratch memory, then a second kernel sums
// the partial rows.
#include <algorithm>

#include "trireme/kernels/amax.cuh"
#include "trireme/kernels/norm.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kSms = 132;  // a constant, so that the order of sums does not depend on the GPU

// Sums of rows.

constexpr int kInFlight = 8;

/// sums += every step-th row from `first` on, of the kLanes columns that `x` points at.
template <int kLanes, typename Scalar>
__device__ void add_rows(float (&sums)[kLanes], const Scalar* __restrict__ x, int64_t first, int64_t rows,
                         int64_t step, int width) {
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

constexpr int kTileColumns = 8;  // 32 bytes of each partial row
constexpr int kTileRows = 64;
constexpr int kTileThreads = kTileColumns * kTileRows;

/// For one or two gradients: total_k (width) += the sum of the rows of partial[k] (rows, width).
template <typename Scalar>
__global__ void __launch_bounds__(kTileThreads)
    add_partial_rows(Scalar* total0, Scalar* total1, const float* partial, int rows, int width) {
  __shared__ float sums[kTileRows][kTileColumns];
  const int x = threadIdx.x, y = threadIdx.y;
  const int column = blockIdx.x * kTileColumns + x;
  float sum[1] = {};
  if (column < width) {
    const float* from = partial + static_cast<int64_t>(blockIdx.y) * rows * width + column;
    add_rows(sum, from, y, rows, kTileRows, width);
  }
  sums[y][x] = sum[0];
  for (int half = kTileRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (y < half) sums[y][x] += sums[y + half][x];
  }
  if (y > 0 || column >= width) return;
  Scalar* total = blockIdx.y == 0 ? total0 : total1;
  total[column] = from_float<Scalar>(to_float(total[column]) + sums[0][x]);
}

/// total1 may be nullptr.
template <typename Scalar>
int launch_add_partial_rows(void* total0, void* total1, const float* partial, int rows, int width,
                            cudaStream_t stream) {
  const dim3 blocks((width + kTileColumns - 1) / kTileColumns, total1 == nullptr ? 1 : 2);
  add_partial_rows<<<blocks, dim3(kTileColumns, kTileRows), 0, stream>>>(
      static_cast<Scalar*>(total0), static_cast<Scalar*>(total1), partial, rows, width);
  return cudaGetLastError();
}

// Backward.

struct Backward {
  void* dx;
  float* partial;  ///< (walkers, width) for dweight, then for dbias
  const void* dy;
  const void* d_sum;
  const void* x;
  const void* weight;
  const float* mean;  ///< LayerNorm only
  const float* rstd;
  int64_t rows;
  int width;
  float* amax = nullptr;
};

/// Rows in work at once on the whole GPU: kMaxThreads threads on each SM.
constexpr int walkers_for(int threads) {
  return kSms * kMaxThreads / threads;
}

/// What one row of the backward pass reads.
template <bool kLayer, typename Shape, typename Scalar>
struct Operands {
  Slice<Scalar, Shape> dy, x, d_sum;
  float mean = 0.0f, rstd;

  __device__ void load(const Backward& a, int64_t row) {
    const int64_t start = row * a.width;
    dy.load_streaming(static_cast<const Scalar*>(a.dy) + start, a.width);
    x.load_streaming(static_cast<const Scalar*>(a.x) + start, a.width);
    if (a.d_sum != nullptr) d_sum.load_streaming(static_cast<const Scalar*>(a.d_sum) + start, a.width);
    if constexpr (kLayer) mean = a.mean[row];
    rstd = a.rstd[row];
  }
};

/// Sums over rows of this thread's columns: in registers until store(), or in `partial` all the time when the
/// Shape holds nothing.
template <typename Shape>
class ColumnSums {
 public:
  __device__ ColumnSums(float* partial, int width) : partial_(partial) {
    if constexpr (!Shape::kHeld) {
      for_packs<Shape>(width, [&](int, int column) {
        for (int j = 0; j < Shape::kLanes; ++j) partial_[column + j] = 0.0f;
      });
    }
  }

  /// Adds a * b.
  __device__ void add(int p, int column, int j, float a, float b) {
    float& sum = Shape::kHeld ? held_[p][j] : partial_[column + j];
    sum = fmaf(a, b, sum);
  }

  __device__ void store(int width) const {
    if constexpr (Shape::kHeld) {
      for_packs<Shape>(width, [&](int p, int column) {
        for (int j = 0; j < Shape::kLanes; j += 4) {
          Pack<float, 4> out;
          for (int k = 0; k < 4; ++k) out.set(k, held_[p][j + k]);
          out.store(partial_ + column + j);
        }
      });
    }
  }

 private:
  float* partial_;
  float held_[Shape::kHeld ? Shape::kPacks : 1][Shape::kLanes] = {};
};

/// Every walker takes each walkers-th row. The loads of the next row are under way while this one is summed;
/// that is safe where dx is dy or d_sum, because only its own walker writes to a row. Products that are added
/// are explicit, so that dx has the same bits with amax and without.
template <bool kLayer, bool kAmax, typename Shape, typename Scalar>
__global__ void __launch_bounds__(Shape::kBlockThreads, kMaxThreads / Shape::kBlockThreads)
    norm_backward(Backward a) {
  __shared__ typename RowSum<Shape::kThreads>::Buffers buffers;
  RowSum<Shape::kThreads> row_sum(buffers);
  const int walkers = gridDim.x * Shape::kRows;
  const int walker = blockIdx.x * Shape::kRows + threadIdx.y;
  const float inverse_width = 1.0f / static_cast<float>(a.width);

  Slice<Scalar, Shape> weight;
  weight.load(static_cast<const Scalar*>(a.weight), a.width);
  float* partial = a.partial + static_cast<int64_t>(walker) * a.width;
  ColumnSums<Shape> dweight(partial, a.width);
  ColumnSums<Shape> dbias(partial + static_cast<int64_t>(walkers) * a.width, kLayer ? a.width : 0);

  Amax amax;
  Operands<kLayer, Shape, Scalar> next;
  if (walker < a.rows) next.load(a, walker);
  for (int64_t row = walker; row < a.rows; row += walkers) {
    const auto now = next;
    if (row + walkers < a.rows) next.load(a, row + walkers);

    float sum = 0.0f, dot = 0.0f;  // of the gradient at the normalised row; with the normalised row
    for_packs<Shape>(a.width, [&](int p, int column) {
      const auto dy = now.dy.pack(p, column);
      const auto x = now.x.pack(p, column);
      const auto w = weight.pack(p, column);
      for (int j = 0; j < Shape::kLanes; ++j) {
        const float normal = __fmul_rn(x[j] - now.mean, now.rstd);
        const float d_normal = __fmul_rn(dy[j], w[j]);
        sum += d_normal;
        dot = fmaf(d_normal, normal, dot);
        dweight.add(p, column, j, dy[j], normal);
        if constexpr (kLayer) dbias.add(p, column, j, dy[j], 1.0f);
      }
    });
    const float mean_d = kLayer ? row_sum(sum) * inverse_width : 0.0f;
    const float mean_dot = row_sum(dot) * inverse_width;

    Scalar* dx = static_cast<Scalar*>(a.dx) + row * a.width;
    for_packs<Shape>(a.width, [&](int p, int column) {
      const auto dy = now.dy.pack(p, column);
      const auto x = now.x.pack(p, column);
      const auto w = weight.pack(p, column);
      float values[Shape::kLanes];
      for (int j = 0; j < Shape::kLanes; ++j) {
        const float normal = __fmul_rn(x[j] - now.mean, now.rstd);
        const float without_mean = __fmul_rn(dy[j], w[j]) - mean_d;
        values[j] = __fmul_rn(now.rstd, fmaf(-normal, mean_dot, without_mean));
      }
      if (a.d_sum != nullptr) {
        const auto d_sum = now.d_sum.pack(p, column);
        for (int j = 0; j < Shape::kLanes; ++j) values[j] += d_sum[j];
      }
      Pack<Scalar, Shape::kLanes> out;
      for (int j = 0; j < Shape::kLanes; ++j) out.set(j, values[j]);
      out.store(dx + column);
      if constexpr (kAmax) amax.see(out);
    });
  }
  if constexpr (kAmax) amax.raise_by_warp(a.amax);
  dweight.store(a.width);
  if constexpr (kLayer) dbias.store(a.width);
}

template <bool kLayer>
int launch_backward(const Backward& a, void* dweight, void* dbias, Dtype dtype, void* stream) {
  if (a.rows == 0 || a.width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const bool packed = packs({a.dx, a.partial, a.dy, a.d_sum, a.x, a.weight}, a.width * sizeof(Scalar));
    return with_shape<Scalar>(packed, a.width, [&](auto shape) -> int {
      using S = decltype(shape);
      const int64_t walkers = std::min<int64_t>(walkers_for(S::kThreads), a.rows);
      const auto blocks = static_cast<unsigned>((walkers + S::kRows - 1) / S::kRows);
      const auto kernel = a.amax == nullptr ? norm_backward<kLayer, false, S, Scalar>
                                            : norm_backward<kLayer, true, S, Scalar>;
      kernel<<<blocks, dim3(S::kThreads, S::kRows), 0, as_stream(stream)>>>(a);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
      return launch_add_partial_rows<Scalar>(dweight, dbias, a.partial, static_cast<int>(blocks) * S::kRows,
                                             a.width, as_stream(stream));
    });
  });
}

// Sums over columns.

constexpr int kColumnThreads = 32;  // packs of a row
constexpr int kColumnRows = 8;
constexpr int kColumnBlock = kColumnThreads * kColumnRows;
constexpr int kMaxColumnWalkers = 1024;

/// Rows in work at once: enough for some 512 threads on each SM, in whole blocks. More packs, fewer walkers.
constexpr int64_t column_walkers(int64_t packs) {
  const int64_t walkers = std::clamp<int64_t>(kSms * kMaxThreads / packs, 1, kMaxColumnWalkers);
  return (walkers + kColumnRows - 1) / kColumnRows * kColumnRows;
}

template <int kLanes, typename Scalar>
__global__ void __launch_bounds__(kColumnBlock)
    column_sums(float* __restrict__ partial, const Scalar* __restrict__ x, int64_t rows, int width) {
  const int column = (blockIdx.x * kColumnThreads + threadIdx.x) * kLanes;
  if (column >= width) return;
  const int64_t walkers = static_cast<int64_t>(gridDim.y) * kColumnRows;
  const int64_t walker = static_cast<int64_t>(blockIdx.y) * kColumnRows + threadIdx.y;
  float sums[kLanes] = {};
  add_rows(sums, x + column, walker, rows, walkers, width);
  for (int j = 0; j < kLanes; ++j) partial[walker * width + column + j] = sums[j];
}

template <int kLanes, typename Scalar>
int launch_column_sums(void* total, float* partial, const Scalar* x, int64_t rows, int width,
                       cudaStream_t stream) {
  const int packs = (width + kLanes - 1) / kLanes;
  const int64_t walkers = std::min(column_walkers(packs), rows);
  const dim3 blocks((packs + kColumnThreads - 1) / kColumnThreads, (walkers + kColumnRows - 1) / kColumnRows);
  column_sums<kLanes><<<blocks, dim3(kColumnThreads, kColumnRows), 0, stream>>>(partial, x, rows, width);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_add_partial_rows<Scalar>(total, nullptr, partial, static_cast<int>(blocks.y) * kColumnRows,
                                         width, stream);
}

/// The packs of a row in the dtype with most lanes: fewest packs, and so most walkers.
constexpr int64_t fewest_packs(int64_t width) {
  return std::max<int64_t>(1, (width + 7) / 8);
}

}  // namespace

int rms_norm_backward(void* dx, void* dweight, float* scratch, const void* dy, const void* d_sum,
                      const void* x, const void* weight, const float* rstd, int64_t rows, int64_t width,
                      Dtype dtype, void* stream, float* amax) {
  const Backward a{dx, scratch, dy, d_sum, x, weight, nullptr, rstd, rows, static_cast<int>(width), amax};
  return launch_backward<false>(a, dweight, nullptr, dtype, stream);
}

int layer_norm_backward(void* dx, void* dweight, void* dbias, float* scratch, const void* dy,
                        const void* d_sum, const void* x, const void* weight, const float* mean,
                        const float* rstd, int64_t rows, int64_t width, Dtype dtype, void* stream,
                        float* amax) {
  const Backward a{dx, scratch, dy, d_sum, x, weight, mean, rstd, rows, static_cast<int>(width), amax};
  return launch_backward<true>(a, dweight, dbias, dtype, stream);
}

int64_t norm_scratch(int64_t width) {
  return 2 * walkers_for(threads_for(fewest_packs(width))) * width;
}

int add_column_sums(void* total, float* scratch, const void* x, int64_t rows, int64_t width, Dtype dtype,
                    void* stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto* values = static_cast<const Scalar*>(x);
    const int columns = static_cast<int>(width);
    return packs({x}, width * sizeof(Scalar))
               ? launch_column_sums<kFullPack<Scalar>>(total, scratch, values, rows, columns,
                                                       as_stream(stream))
               : launch_column_sums<1>(total, scratch, values, rows, columns, as_stream(stream));
  });
}

int64_t column_scratch(int64_t width) {
  return column_walkers(fewest_packs(width)) * width;
}

}  // namespace trireme::kernels::cuda
