#include <cstdint>

#include "trireme/kernels/activation.cuh"
#include "trireme/kernels/amax.cuh"
#include "trireme/kernels/column_sums.cuh"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// The factor (1 + tanh(u)) / 2 of GELU is sigmoid(2u), which keeps its relative precision for negative x.
constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

template <typename Scalar>
__device__ float gelu_gate(float x) {
  return sigmoid<Scalar>(kTwoRootTwoOverPi * (x + kCubic * x * x * x));
}

template <typename Scalar>
struct GeluForward {
  static constexpr int kInputs = 1, kOutputs = 1, kGradients = 1, kPacks = 2;
  static __device__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    out[0] = in[0] * gelu_gate<Scalar>(in[0]);
  }
};

/// dx, and y where kAgain, from (x, dy).
template <typename Scalar, bool kAgain = false>
struct GeluBackward {
  static constexpr int kInputs = 2, kGradients = 1, kOutputs = kGradients + kAgain, kPacks = 2;
  static __device__ void apply(const float (&in)[kInputs], float (&out)[kOutputs]) {
    const auto& [x, dy] = in;
    const float s = gelu_gate<Scalar>(x);
    const float inner_slope = kTwoRootTwoOverPi * (1.0f + 3.0f * kCubic * x * x);
    out[0] = dy * (s + x * s * (1.0f - s) * inner_slope);
    if constexpr (kAgain) out[1] = x * s;
  }
};

/// Rows of a matrix, `stride` elements apart.
template <typename Scalar>
struct Rows {
  Scalar* data;
  int64_t stride;
};

template <typename Scalar, typename Function>
struct Arguments {
  Rows<const Scalar> in[Function::kInputs];
  Rows<Scalar> out[Function::kOutputs];
  float* amax = nullptr;
};

/// Function on every element of (rows, width). A row is cut into `tiles` blocks. Outputs may be inputs: a
/// thread reads all it needs before it writes, and writes only where it read.
template <typename Function, typename Scalar, int kLanes, bool kAmax>
__global__ void __launch_bounds__(kThreads)
    map_rows(Arguments<Scalar, Function> arguments, unsigned tiles, int64_t width) {
  constexpr int kPacks = Function::kPacks;
  const unsigned row = blockIdx.x / tiles, tile = blockIdx.x - row * tiles;
  const int64_t first = (static_cast<int64_t>(tile) * (kPacks * kThreads) + threadIdx.x) * kLanes;
  RawPack<Scalar, kLanes> in[kPacks][Function::kInputs];
  Amax amax;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t column = first + p * kThreads * kLanes;
    if (column >= width) continue;
#pragma unroll
    for (int i = 0; i < Function::kInputs; ++i) {
      in[p][i].load(arguments.in[i].data + row * arguments.in[i].stride + column);
    }
  }
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    const int64_t column = first + p * kThreads * kLanes;
    if (column >= width) continue;
    Pack<Scalar, kLanes> out[Function::kOutputs];
    map_pack<Function>(in[p], out);
#pragma unroll
    for (int i = 0; i < Function::kOutputs; ++i) {
      out[i].store(arguments.out[i].data + row * arguments.out[i].stride + column);
      if (kAmax && i < Function::kGradients) amax.see(out[i]);
    }
  }
  if constexpr (kAmax) amax.template raise_by_block<kThreads>(arguments.amax);
}

template <typename Function, int kLanes, typename Scalar>
int launch(const Arguments<Scalar, Function>& arguments, int64_t rows, int64_t width, void* stream) {
  if (rows == 0 || width == 0) return cudaSuccess;
  constexpr int64_t kTile = int64_t{Function::kPacks} * kThreads * kLanes;
  const int64_t tiles = (width + kTile - 1) / kTile;
  const auto kernel = arguments.amax == nullptr ? map_rows<Function, Scalar, kLanes, false>
                                                : map_rows<Function, Scalar, kLanes, true>;
  kernel<<<static_cast<unsigned>(rows * tiles), kThreads, 0, as_stream(stream)>>>(
      arguments, static_cast<unsigned>(tiles), width);
  return cudaGetLastError();
}

template <typename Function, typename Scalar>
int map_matrix(const Arguments<Scalar, Function>& arguments, bool packed, int64_t rows, int64_t width,
               void* stream) {
  return packed ? launch<Function, kFullPack<Scalar>>(arguments, rows, width, stream)
                : launch<Function, 1>(arguments, rows, width, stream);
}

/// A flat array: full packs first, then the few elements after the last of them.
template <typename Function, typename Scalar>
int map_array(Arguments<Scalar, Function> arguments, bool packed, int64_t count, void* stream) {
  const int64_t head = packed ? count - count % kFullPack<Scalar> : 0;
  const int status = launch<Function, kFullPack<Scalar>>(arguments, 1, head, stream);
  if (status != cudaSuccess) return status;
  for (auto& rows : arguments.in) rows.data += head;
  for (auto& rows : arguments.out) rows.data += head;
  return launch<Function, 1>(arguments, 1, count - head, stream);
}

/// Function on every element of (rows, width), with the sums over the rows of its first output in `partial`
/// (walkers, width). As add_rows() walks, with fewer rows in flight, since there are more operands.
template <typename Function, typename Scalar, int kLanes, bool kAmax>
__global__ void __launch_bounds__(kColumnBlock)
    map_columns(Arguments<Scalar, Function> arguments, float* __restrict__ partial, int64_t rows, int width) {
  constexpr int kInFlight = 2;
  const int column = (blockIdx.x * kColumnThreads + threadIdx.x) * kLanes;
  const int64_t walkers = static_cast<int64_t>(gridDim.y) * kColumnRows;
  const int64_t walker = static_cast<int64_t>(blockIdx.y) * kColumnRows + threadIdx.y;
  float sums[kLanes] = {};
  Amax amax;
  for (int64_t row = column < width ? walker : rows; row < rows; row += kInFlight * walkers) {
    RawPack<Scalar, kLanes> in[kInFlight][Function::kInputs];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t at = (row + u * walkers) * width + column;
#pragma unroll
      for (int i = 0; i < Function::kInputs; ++i) {
        if (row + u * walkers < rows) in[u][i].load(arguments.in[i].data + at);
      }
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (row + u * walkers >= rows) break;
      Pack<Scalar, kLanes> out[Function::kOutputs];
      map_pack<Function>(in[u], out);
#pragma unroll
      for (int i = 0; i < Function::kOutputs; ++i) {
        out[i].store(arguments.out[i].data + (row + u * walkers) * width + column);
      }
      if constexpr (kAmax) amax.see(out[0]);
      for (int j = 0; j < kLanes; ++j) sums[j] += out[0][j];
    }
  }
  if constexpr (kAmax) amax.raise_by_warp(arguments.amax);
  if (column >= width) return;
  for (int j = 0; j < kLanes; ++j) partial[walker * width + column + j] = sums[j];
}

template <int kLanes, typename Function, typename Scalar>
int launch_columns(const Arguments<Scalar, Function>& arguments, float* sums, float* partial, int64_t rows,
                   int width, void* stream) {
  const int64_t walkers = std::min(walkers_of_two((width + kLanes - 1) / kLanes), rows);
  const dim3 blocks = column_grid<kLanes>(walkers, width);
  const auto kernel = arguments.amax == nullptr ? map_columns<Function, Scalar, kLanes, false>
                                                : map_columns<Function, Scalar, kLanes, true>;
  kernel<<<blocks, dim3(kColumnThreads, kColumnRows), 0, as_stream(stream)>>>(arguments, partial, rows,
                                                                              width);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return launch_add_partial_rows(ColumnTotals<Scalar>{.sums = sums}, partial,
                                 static_cast<int>(blocks.y) * kColumnRows, width, as_stream(stream));
}

/// Calls map with the arguments of a backward pass, which gives y again where it is not nullptr.
template <typename Scalar, typename Map>
int with_gelu_arguments(void* dx, const void* dy, const void* x, void* y, float* amax, const Map& map) {
  const auto filled = [&](auto arguments) {
    arguments.in[0] = {static_cast<const Scalar*>(x), 0};
    arguments.in[1] = {static_cast<const Scalar*>(dy), 0};
    arguments.out[0] = {static_cast<Scalar*>(dx), 0};
    arguments.amax = amax;
    return arguments;
  };
  if (y == nullptr) return map(filled(Arguments<Scalar, GeluBackward<Scalar>>{}));
  auto again = filled(Arguments<Scalar, GeluBackward<Scalar, true>>{});
  again.out[1] = {static_cast<Scalar*>(y), 0};
  return map(again);
}

}  // namespace

int swiglu_forward(void* y, const void* gate_up, int64_t rows, int64_t width, Dtype dtype, void* stream,
                   float* amax) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto* gate = static_cast<const Scalar*>(gate_up);
    const Arguments<Scalar, SwigluForward<Scalar>> arguments{
        .in = {{gate, 2 * width}, {gate + width, 2 * width}},
        .out = {{static_cast<Scalar*>(y), width}},
        .amax = amax};
    const bool packed = packs({y, gate_up}, width * static_cast<int64_t>(sizeof(Scalar)));
    return map_matrix(arguments, packed, rows, width, stream);
  });
}

int swiglu_backward(void* d_gate_up, const void* dy, const void* gate_up, int64_t rows, int64_t width,
                    Dtype dtype, void* stream, float* amax, void* y) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const auto* gate = static_cast<const Scalar*>(gate_up);
    auto* d_gate = static_cast<Scalar*>(d_gate_up);
    const bool packed = packs({d_gate_up, dy, gate_up, y}, width * static_cast<int64_t>(sizeof(Scalar)));
    const auto map = [&](auto arguments) {
      arguments.in[0] = {gate, 2 * width};
      arguments.in[1] = {gate + width, 2 * width};
      arguments.in[2] = {static_cast<const Scalar*>(dy), width};
      arguments.out[0] = {d_gate, 2 * width};
      arguments.out[1] = {d_gate + width, 2 * width};
      arguments.amax = amax;
      return map_matrix(arguments, packed, rows, width, stream);
    };
    if (y == nullptr) return map(Arguments<Scalar, SwigluBackward<Scalar>>{});
    Arguments<Scalar, SwigluBackward<Scalar, true>> again{};
    again.out[2] = {static_cast<Scalar*>(y), width};
    return map(again);
  });
}

int gelu_forward(void* y, const void* x, int64_t count, Dtype dtype, void* stream, float* amax) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Arguments<Scalar, GeluForward<Scalar>> arguments{
        .in = {{static_cast<const Scalar*>(x), 0}}, .out = {{static_cast<Scalar*>(y), 0}}, .amax = amax};
    return map_array(arguments, packs({y, x}, 0), count, stream);
  });
}

int gelu_backward(void* dx, const void* dy, const void* x, int64_t count, Dtype dtype, void* stream,
                  float* amax, void* y) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    return with_gelu_arguments<Scalar>(dx, dy, x, y, amax, [&](const auto& arguments) {
      return map_array(arguments, packs({dx, dy, x, y}, 0), count, stream);
    });
  });
}

int gelu_backward_with_sums(void* dx, float* dx_sums, float* scratch, const void* dy, const void* x,
                            int64_t rows, int64_t width, Dtype dtype, void* stream, float* amax, void* y) {
  if (rows == 0 || width == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    return with_gelu_arguments<Scalar>(dx, dy, x, y, amax, [&](const auto& arguments) {
      const bool packed = packs({dx, dy, x, y}, width * static_cast<int64_t>(sizeof(Scalar)));
      const int columns = static_cast<int>(width);
      return packed ? launch_columns<kFullPack<Scalar>>(arguments, dx_sums, scratch, rows, columns, stream)
                    : launch_columns<1>(arguments, dx_sums, scratch, rows, columns, stream);
    });
  });
}

}  // namespace trireme::kernels::cuda
