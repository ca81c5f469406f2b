#include <algorithm>
#include <cstdint>

#include "trireme/kernels/column_sums.cuh"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

template <typename Scalar>
struct ScaledColumns {
  Scalar* out;
  const Scalar* in;
  const Scalar* beside;  ///< what `in` is multiplied with for the sums
  const float* factors;
};

/// out = in * factors on (rows, width), and with kSums the sums over the rows of in * beside in `partial`
/// (walkers, width). A thread has one pack of columns and every walkers-th row, so that it loads its factors
/// once.
template <typename Scalar, int kLanes, bool kSums>
__global__ void __launch_bounds__(kColumnBlock)
    scale_columns_kernel(ScaledColumns<Scalar> at, float* __restrict__ partial, int64_t rows, int width) {
  constexpr int kInFlight = 4;
  const int column = (blockIdx.x * kColumnThreads + threadIdx.x) * kLanes;
  if (column >= width) return;
  const int64_t walkers = static_cast<int64_t>(gridDim.y) * kColumnRows;
  const int64_t walker = static_cast<int64_t>(blockIdx.y) * kColumnRows + threadIdx.y;
  float factors[kLanes], sums[kLanes] = {};
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) factors[lane] = at.factors[column + lane];
  for (int64_t row = walker; row < rows; row += kInFlight * walkers) {
    RawPack<Scalar, kLanes> in[kInFlight], beside[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t element = (row + u * walkers) * width + column;
      if (row + u * walkers >= rows) break;
      in[u].load(at.in + element);
      if constexpr (kSums) beside[u].load(at.beside + element);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (row + u * walkers >= rows) break;
      const Pack<Scalar, kLanes> values = in[u].pack();
      Pack<Scalar, kLanes> out;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) out.set(lane, values[lane] * factors[lane]);
      out.store(at.out + (row + u * walkers) * width + column);
      if constexpr (kSums) {
        const Pack<Scalar, kLanes> others = beside[u].pack();
#pragma unroll
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += values[lane] * others[lane];
      }
    }
  }
  if constexpr (kSums) {
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) partial[walker * width + column + lane] = sums[lane];
  }
}

/// `sums` nullptr: none are taken.
template <typename Scalar, int kLanes>
int launch_scaled(const ScaledColumns<Scalar>& at, float* sums, float* partial, int64_t rows, int width,
                  cudaStream_t stream) {
  const int64_t walkers = std::min(walkers_of_two((width + kLanes - 1) / kLanes), rows);
  const dim3 blocks = column_grid<kLanes>(walkers, width), threads(kColumnThreads, kColumnRows);
  const auto kernel = sums == nullptr ? scale_columns_kernel<Scalar, kLanes, false>
                                      : scale_columns_kernel<Scalar, kLanes, true>;
  kernel<<<blocks, threads, 0, stream>>>(at, partial, rows, width);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess || sums == nullptr) return error;
  return launch_add_partial_rows(ColumnTotals<Scalar>{.sums = sums}, partial,
                                 static_cast<int>(blocks.y) * kColumnRows, width, stream);
}

int scale_matrix(void* out, float* sums, float* partial, const void* in, const void* beside,
                 const float* factors, int64_t rows, int64_t width, Dtype dtype, void* stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const ScaledColumns<Scalar> at{static_cast<Scalar*>(out), static_cast<const Scalar*>(in),
                                   static_cast<const Scalar*>(beside), factors};
    const auto launch = packs({out, in, beside}, width * static_cast<int64_t>(sizeof(Scalar)))
                            ? launch_scaled<Scalar, kFullPack<Scalar>>
                            : launch_scaled<Scalar, 1>;
    return launch(at, sums, partial, rows, static_cast<int>(width), as_stream(stream));
  });
}

}  // namespace

int scale_columns(void* y, const void* x, const float* factors, int64_t rows, int64_t width, Dtype dtype,
                  void* stream) {
  return scale_matrix(y, nullptr, nullptr, x, nullptr, factors, rows, width, dtype, stream);
}

int scale_columns_backward(void* dx, float* d_factors, float* scratch, const void* dy, const void* x,
                           const float* factors, int64_t rows, int64_t width, Dtype dtype, void* stream) {
  return scale_matrix(dx, d_factors, scratch, dy, x, factors, rows, width, dtype, stream);
}

}  // namespace trireme::kernels::cuda
