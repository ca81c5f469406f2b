// RMSNorm and LayerNorm.
#include "trireme/kernels/amax.cuh"
#include "trireme/kernels/norm.cuh"

namespace trireme::kernels::cuda {
namespace {

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
  float* amax = nullptr;
};

/// For a warp in place of two: 8 blocks of an SM have enough loads in flight; more, with fewer registers, are
/// slower.
template <typename Shape>
constexpr int kMinBlocks = Shape::kParts == 1 ? 0 : 8;

template <bool kLayer, bool kAmax, typename Shape, typename Scalar>
__global__ void __launch_bounds__(Shape::kBlockThreads, kMinBlocks<Shape>) norm_forward(Forward a) {
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
  Amax amax;
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
    if constexpr (kAmax) amax.see(out);
  });
  if constexpr (kAmax) amax.raise_by_warp(a.amax);
}

template <bool kLayer, typename Scalar, typename Shape>
int launch_shape(const Forward& a, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((a.rows + Shape::kRows - 1) / Shape::kRows);
  const auto kernel = a.amax == nullptr ? norm_forward<kLayer, false, Shape, Scalar>
                                        : norm_forward<kLayer, true, Shape, Scalar>;
  kernel<<<blocks, dim3(Shape::kThreads, Shape::kRows), 0, stream>>>(a);
  return cudaGetLastError();
}

template <bool kLayer>
int launch_forward(const Forward& a, Dtype dtype, void* stream) {
  if (a.rows == 0 || a.width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const bool packed = packs({a.y, a.sum, a.x, a.delta, a.weight, a.bias}, a.width * sizeof(Scalar));
    if constexpr (kLayer) {
      using Warp = Shape<32, 3, kFullPack<Scalar>, 2>;  // for two warps: the same sums without barriers
      if (packed && a.width == Warp::kThreads * Warp::kPacks * Warp::kLanes) {
        return launch_shape<kLayer, Scalar, Warp>(a, as_stream(stream));
      }
    }
    return with_shape<Scalar>(packed, a.width, [&](auto shape) {
      return launch_shape<kLayer, Scalar, decltype(shape)>(a, as_stream(stream));
    });
  });
}

}  // namespace

int rms_norm_forward(void* y, void* sum, float* rstd, const void* x, const void* delta, const void* weight,
                     int64_t rows, int64_t width, float eps, Dtype dtype, void* stream, float* amax) {
  const Forward a{y, sum, nullptr, rstd, x, delta, weight, nullptr, rows, static_cast<int>(width), eps, amax};
  return launch_forward<false>(a, dtype, stream);
}

int layer_norm_forward(void* y, void* sum, float* mean, float* rstd, const void* x, const void* delta,
                       const void* weight, const void* bias, int64_t rows, int64_t width, float eps,
                       Dtype dtype, void* stream, float* amax) {
  const Forward a{y, sum, mean, rstd, x, delta, weight, bias, rows, static_cast<int>(width), eps, amax};
  return launch_forward<true>(a, dtype, stream);
}

}  // namespace trireme::kernels::cuda
