// Gradients of RMSNorm and LayerNorm, and sums over columns.
#include <algorithm>

#include "trireme/kernels/amax.cuh"
#include "trireme/kernels/column_sums.cuh"
#include "trireme/kernels/norm.cuh"

namespace trireme::kernels::cuda {
namespace {

// Backward.

struct Backward {
  void* dx;
  float* partial;  ///< (walkers, width) for dweight, for dbias, and for dx_sums
  const void* dy;
  const void* d_sum;
  const void* x;
  const void* weight;
  const float* mean;  ///< LayerNorm only
  const float* rstd;
  int64_t rows;
  int width;
  float* amax = nullptr;
  float* dx_sums = nullptr;
};

/// The inputs of one row of the backward pass.
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
template <bool kLayer, bool kAmax, bool kSums, typename Shape, typename Scalar>
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
  const int64_t kind = static_cast<int64_t>(walkers) * a.width;
  ColumnSums<Shape> dbias(partial + kind, kLayer ? a.width : 0);
  ColumnSums<Shape> dx_sums(partial + 2 * kind, kSums ? a.width : 0);

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
      for (int j = 0; j < Shape::kLanes; ++j) {
        out.set(j, values[j]);
        if constexpr (kSums) dx_sums.add(p, column, j, out[j], 1.0f);
      }
      out.store(dx + column);
      if constexpr (kAmax) amax.see(out);
    });
  }
  if constexpr (kAmax) amax.raise_by_warp(a.amax);
  dweight.store(a.width);
  if constexpr (kLayer) dbias.store(a.width);
  if constexpr (kSums) dx_sums.store(a.width);
}

template <bool kLayer, bool kAmax, typename Shape, typename Scalar>
auto norm_backward_kernel(bool sums) {
  if constexpr (kLayer) {
    if (sums) return norm_backward<kLayer, kAmax, true, Shape, Scalar>;
  }
  return norm_backward<kLayer, kAmax, false, Shape, Scalar>;
}

template <bool kLayer>
int launch_backward(const Backward& a, void* dweight, void* dbias, Dtype dtype, void* stream) {
  if (a.rows == 0 || a.width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const bool packed = packs({a.dx, a.partial, a.dy, a.d_sum, a.x, a.weight}, a.width * sizeof(Scalar));
    return with_shape<Scalar>(packed, a.width, [&](auto shape) -> int {
      using S = decltype(shape);
      const int64_t walkers = std::min<int64_t>(walkers_of<Scalar>(a.width), a.rows);
      const auto blocks = static_cast<unsigned>((walkers + S::kRows - 1) / S::kRows);
      const bool sums = a.dx_sums != nullptr;
      const auto kernel = a.amax == nullptr ? norm_backward_kernel<kLayer, false, S, Scalar>(sums)
                                            : norm_backward_kernel<kLayer, true, S, Scalar>(sums);
      kernel<<<blocks, dim3(S::kThreads, S::kRows), 0, as_stream(stream)>>>(a);
      const cudaError_t error = cudaGetLastError();
      if (error != cudaSuccess) return error;
      const ColumnTotals<Scalar> totals{
          .gradients = {static_cast<Scalar*>(dweight), static_cast<Scalar*>(dbias)},
          .gradient_count = kLayer ? 2 : 1,
          .sums = a.dx_sums};
      return launch_add_partial_rows(totals, a.partial, static_cast<int>(blocks) * S::kRows, a.width,
                                     as_stream(stream));
    });
  });
}

// Sums over columns.

template <int kLanes, typename Scalar>
__global__ void __launch_bounds__(kColumnBlock)
    column_sums(float* __restrict__ partial, const Scalar* __restrict__ x, int64_t rows, int width,
                int64_t walkers) {
  const int column = (blockIdx.x * kColumnThreads + threadIdx.x) * kLanes;
  const int64_t walker = static_cast<int64_t>(blockIdx.y) * kColumnRows + threadIdx.y;
  if (column >= width || walker >= walkers) return;
  float sums[kLanes] = {};
  add_rows(sums, x + column, walker, rows, walkers, width);
  for (int j = 0; j < kLanes; ++j) partial[walker * width + column + j] = sums[j];
}

template <int kLanes, typename Scalar>
int launch_column_sums(Scalar* total, float* partial, const Scalar* x, int64_t rows, int width,
                       cudaStream_t stream) {
  const int64_t walkers = std::min<int64_t>(walkers_of<Scalar>(width), rows);
  const dim3 blocks = column_grid<kLanes>(walkers, width);
  column_sums<kLanes>
      <<<blocks, dim3(kColumnThreads, kColumnRows), 0, stream>>>(partial, x, rows, width, walkers);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_add_partial_rows(ColumnTotals<Scalar>{.gradients = {total}, .gradient_count = 1}, partial,
                                 static_cast<int>(walkers), width, stream);
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
                        float* amax, float* dx_sums) {
  const Backward a{dx,   scratch, dy, d_sum, x, weight, mean, rstd, rows, static_cast<int>(width),
                   amax, dx_sums};
  return launch_backward<true>(a, dweight, dbias, dtype, stream);
}

int64_t norm_scratch(int64_t width, int kinds) {
  return kinds * most_walkers(width) * width;
}

int add_column_sums(void* total, float* scratch, const void* x, int64_t rows, int64_t width, Dtype dtype,
                    void* stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto* values = static_cast<const Scalar*>(x);
    const int columns = static_cast<int>(width);
    return packs({x}, width * sizeof(Scalar))
               ? launch_column_sums<kFullPack<Scalar>>(static_cast<Scalar*>(total), scratch, values, rows,
                                                       columns, as_stream(stream))
               : launch_column_sums<1>(static_cast<Scalar*>(total), scratch, values, rows, columns,
                                       as_stream(stream));
  });
}

int64_t column_scratch(int64_t width) {
  return (most_walkers(width) + kColumnRows) * width;
}

}  // namespace trireme::kernels::cuda
