// RMSNorm, LayerNorm and sums over columns. Gradients of weights are summed in two steps: many walkers each
// sum some of the rows into a partial row of the scratch memory, then a second kernel sums the partial rows.
#include <algorithm>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kSms = 132;  // a constant, so that the order of sums does not depend on the GPU

// How a row is spread over threads.

/// kThreads threads hold kPacks packs of kLanes elements each; kPacks = 0: rows of any width, read from
/// memory again for every pass.
template <int kThreads_, int kPacks_, int kLanes_>
struct Shape {
  static constexpr int kThreads = kThreads_, kPacks = kPacks_, kLanes = kLanes_;
  static constexpr bool kHeld = kPacks > 0;
  static constexpr int kRows = kThreads == 32 ? 4 : 1;  ///< rows that a block works on at a time
  static constexpr int kBlockThreads = kThreads * kRows;
};

constexpr int kPacksHeld = 2;  ///< 16 bytes of each operand twice leave room to prefetch the next row
constexpr int kMaxThreads = 512;

constexpr int threads_for(int64_t packs) {
  int threads = 32;
  while (threads < kMaxThreads && threads * kPacksHeld < packs) threads *= 2;
  return threads;
}

/// Calls body with the Shape for rows of `width` elements.
template <typename Scalar, typename Body>
int with_shape(bool packed, int64_t width, const Body& body) {
  constexpr int kLanes = kFullPack<Scalar>;
  if (!packed) return body(Shape<kMaxThreads, 0, 1>{});
  const int64_t packs = width / kLanes;
  switch (threads_for(packs)) {
    case 32:
      return body(Shape<32, kPacksHeld, kLanes>{});
    case 64:
      return body(Shape<64, kPacksHeld, kLanes>{});
    case 128:
      return body(Shape<128, kPacksHeld, kLanes>{});
    case 256:
      return body(Shape<256, kPacksHeld, kLanes>{});
    default:
      return packs <= kMaxThreads * kPacksHeld ? body(Shape<kMaxThreads, kPacksHeld, kLanes>{})
                                               : body(Shape<kMaxThreads, 0, kLanes>{});
  }
}

/// body(p, column) for every pack of this thread: the p-th one, which starts at `column`.
template <typename Shape, typename Body>
__device__ void for_packs(int width, const Body& body) {
  const int first = static_cast<int>(threadIdx.x) * Shape::kLanes;
  constexpr int kStep = Shape::kThreads * Shape::kLanes;
  if constexpr (Shape::kHeld) {
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
      if (first + p * kStep < width) body(p, first + p * kStep);
    }
  } else {
    for (int column = first; column < width; column += kStep) body(0, column);
  }
}

/// This thread's part of a row: in registers, or where it lies when the Shape holds nothing.
template <typename Scalar, typename Shape>
class Slice {
 public:
  using RowPack = Pack<Scalar, Shape::kLanes>;

  __device__ void load(const Scalar* row, int width) {
    row_ = row;
    if constexpr (Shape::kHeld) {
      for_packs<Shape>(width, [&](int p, int column) { held_[p].load(row + column); });
    }
  }

  /// For rows that nobody reads again soon.
  __device__ void load_streaming(const Scalar* row, int width) {
    row_ = row;
    if constexpr (Shape::kHeld) {
      for_packs<Shape>(width, [&](int p, int column) { held_[p].load_streaming(row + column); });
    }
  }

  __device__ RowPack pack(int p, int column) const {
    if constexpr (Shape::kHeld) {
      return held_[p].pack();
    } else {
      RowPack read;
      read.load(row_ + column);
      return read;
    }
  }

  /// The slice becomes slice + other, rounded to Scalar, and is stored in `to`.
  __device__ void add(const Scalar* other, Scalar* to, int width) {
    Slice addend;
    addend.load_streaming(other, width);
    for_packs<Shape>(width, [&](int p, int column) {
      RowPack total = pack(p, column);
      const RowPack delta = addend.pack(p, column);
      for (int j = 0; j < Shape::kLanes; ++j) total.set(j, total[j] + delta[j]);
      total.store(to + column);
      if constexpr (Shape::kHeld) held_[p].assign(total);
    });
    row_ = to;
  }

  /// The sum of term(element).
  template <typename Term>
  __device__ float sum(int width, const Term& term) const {
    float total = 0.0f;
    for_packs<Shape>(width, [&](int p, int column) {
      const RowPack values = pack(p, column);
      for (int j = 0; j < Shape::kLanes; ++j) total += term(values[j]);
    });
    return total;
  }

 private:
  const Scalar* row_;
  RawPack<Scalar, Shape::kLanes> held_[Shape::kHeld ? Shape::kPacks : 1];
};

/// Sums over the threads of a row, one after another. Two buffers take turns: who writes one of them has
/// passed the barrier of the other, which all threads reach only after they have read the first.
template <int kThreads>
class RowSum {
 public:
  using Buffers = float[2][kThreads / 32];

  __device__ explicit RowSum(Buffers& buffers) : buffers_(buffers) {}

  __device__ float operator()(float value) {
    turn_ ^= 1;
    return block_sum<kThreads>(value, buffers_[turn_]);
  }

 private:
  Buffers& buffers_;
  int turn_ = 0;
};

// Forward.

struct Forward {
  void* y;
  void* sum;
  float* mean;  ///< LayerNorm only, as is bias
  float* rstd;
  const void* x;
  const void* delta;
  const void* weight;
  const void* bias;
  int64_t rows;
  int width;
  float eps;
};

template <bool kLayer, typename Shape, typename Scalar>
__global__ void __launch_bounds__(Shape::kBlockThreads) norm_forward(Forward a) {
  __shared__ typename RowSum<Shape::kThreads>::Buffers buffers;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * Shape::kRows + threadIdx.y;
  if (row >= a.rows) return;
  const int64_t start = row * a.width;

  Slice<Scalar, Shape> in, weight, bias;
  in.load_streaming(static_cast<const Scalar*>(a.x) + start, a.width);
  weight.load(static_cast<const Scalar*>(a.weight), a.width);
  if constexpr (kLayer) bias.load(static_cast<const Scalar*>(a.bias), a.width);
  if (a.delta != nullptr) {
    in.add(static_cast<const Scalar*>(a.delta) + start, static_cast<Scalar*>(a.sum) + start, a.width);
  }

  RowSum<Shape::kThreads> row_sum(buffers);
  const float inverse_width = 1.0f / static_cast<float>(a.width);
  float mean = 0.0f;
  if constexpr (kLayer) mean = row_sum(in.sum(a.width, [](float v) { return v; })) * inverse_width;
  const float squares = row_sum(in.sum(a.width, [=](float v) { return (v - mean) * (v - mean); }));
  const float rstd = 1.0f / sqrtf(squares * inverse_width + a.eps);
  if (threadIdx.x == 0) {
    a.rstd[row] = rstd;
    if constexpr (kLayer) a.mean[row] = mean;
  }

  Scalar* y = static_cast<Scalar*>(a.y) + start;
  for_packs<Shape>(a.width, [&](int p, int column) {
    const auto v = in.pack(p, column);
    const auto w = weight.pack(p, column);
    Pack<Scalar, Shape::kLanes> out;
    if constexpr (kLayer) {
      const auto b = bias.pack(p, column);
      for (int j = 0; j < Shape::kLanes; ++j) out.set(j, (v[j] - mean) * rstd * w[j] + b[j]);
    } else {
      for (int j = 0; j < Shape::kLanes; ++j) out.set(j, v[j] * rstd * w[j]);
    }
    out.store(y + column);
  });
}

template <bool kLayer>
int launch_forward(const Forward& a, Dtype dtype, void* stream) {
  if (a.rows == 0 || a.width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const bool packed = packs({a.y, a.sum, a.x, a.delta, a.weight, a.bias}, a.width * sizeof(Scalar));
    return with_shape<Scalar>(packed, a.width, [&](auto shape) -> int {
      using S = decltype(shape);
      const auto blocks = static_cast<unsigned>((a.rows + S::kRows - 1) / S::kRows);
      norm_forward<kLayer, S, Scalar><<<blocks, dim3(S::kThreads, S::kRows), 0, as_stream(stream)>>>(a);
      return cudaGetLastError();
    });
  });
}

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

  __device__ void add(int p, int column, int j, float value) {
    if constexpr (Shape::kHeld) {
      held_[p][j] += value;
    } else {
      partial_[column + j] += value;
    }
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
/// that is safe where dx is dy or d_sum, because only its own walker writes to a row.
template <bool kLayer, typename Shape, typename Scalar>
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
        const float normal = (x[j] - now.mean) * now.rstd;
        const float d_normal = dy[j] * w[j];
        sum += d_normal;
        dot += d_normal * normal;
        dweight.add(p, column, j, dy[j] * normal);
        if constexpr (kLayer) dbias.add(p, column, j, dy[j]);
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
        const float normal = (x[j] - now.mean) * now.rstd;
        values[j] = now.rstd * (dy[j] * w[j] - mean_d - normal * mean_dot);
      }
      if (a.d_sum != nullptr) {
        const auto d_sum = now.d_sum.pack(p, column);
        for (int j = 0; j < Shape::kLanes; ++j) values[j] += d_sum[j];
      }
      Pack<Scalar, Shape::kLanes> out;
      for (int j = 0; j < Shape::kLanes; ++j) out.set(j, values[j]);
      out.store(dx + column);
    });
  }
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
      norm_backward<kLayer, S, Scalar><<<blocks, dim3(S::kThreads, S::kRows), 0, as_stream(stream)>>>(a);
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

int rms_norm_forward(void* y, void* sum, float* rstd, const void* x, const void* delta, const void* weight,
                     int64_t rows, int64_t width, float eps, Dtype dtype, void* stream) {
  const Forward a{y, sum, nullptr, rstd, x, delta, weight, nullptr, rows, static_cast<int>(width), eps};
  return launch_forward<false>(a, dtype, stream);
}

int layer_norm_forward(void* y, void* sum, float* mean, float* rstd, const void* x, const void* delta,
                       const void* weight, const void* bias, int64_t rows, int64_t width, float eps,
                       Dtype dtype, void* stream) {
  const Forward a{y, sum, mean, rstd, x, delta, weight, bias, rows, static_cast<int>(width), eps};
  return launch_forward<true>(a, dtype, stream);
}

int rms_norm_backward(void* dx, void* dweight, float* scratch, const void* dy, const void* d_sum,
                      const void* x, const void* weight, const float* rstd, int64_t rows, int64_t width,
                      Dtype dtype, void* stream) {
  const Backward a{dx, scratch, dy, d_sum, x, weight, nullptr, rstd, rows, static_cast<int>(width)};
  return launch_backward<false>(a, dweight, nullptr, dtype, stream);
}

int layer_norm_backward(void* dx, void* dweight, void* dbias, float* scratch, const void* dy,
                        const void* d_sum, const void* x, const void* weight, const float* mean,
                        const float* rstd, int64_t rows, int64_t width, Dtype dtype, void* stream) {
  const Backward a{dx, scratch, dy, d_sum, x, weight, mean, rstd, rows, static_cast<int>(width)};
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
