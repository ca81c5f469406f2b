// Weights of convolutions (out, channels, positions) turned to channels-last (out, positions, channels), and
// their gradients turned back. A tile goes through shared memory, so that both sides are read and written in
// their order in memory.
#include <algorithm>
#include <bit>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 4096;  // elements

/// The weights that a block turns: some channels of one output, at all positions.
struct Tile {
  int width, positions, count;
  int64_t channels, first, row;

  __device__ Tile(const ConvWeights& shape, int across)
      : positions(static_cast<int>(shape.positions)),
        channels(shape.channels),
        first(static_cast<int64_t>(blockIdx.y) * across),
        row(static_cast<int64_t>(blockIdx.x) * channels * positions) {
    width = static_cast<int>(min(static_cast<int64_t>(across), channels - first));
    count = width * positions;
  }
  /// In contiguous weights, where the tile is one piece.
  __device__ int64_t contiguous(int i) const { return row + first * positions + i; }
  /// The i-th element of the tile in channels-last order: in shared memory, and in the weights.
  __device__ int shared(int i) const { return i % width * positions + i / width; }
  __device__ int64_t channels_last(int i) const { return row + i / width * channels + first + i % width; }
};

template <typename Scalar>
__global__ void __launch_bounds__(kThreads)
    turn_conv_weights(Scalar* to, const Scalar* __restrict__ from, ConvWeights shape, int across) {
  __shared__ Scalar elements[kTile];
  const Tile tile(shape, across);
#pragma unroll 4
  for (int i = threadIdx.x; i < tile.count; i += kThreads) elements[i] = from[tile.contiguous(i)];
  __syncthreads();
  for (int i = threadIdx.x; i < tile.count; i += kThreads)
    to[tile.channels_last(i)] = elements[tile.shared(i)];
}

template <typename Scalar, typename Sum>
__global__ void __launch_bounds__(kThreads)
    add_conv_weights(Sum* to, const Scalar* __restrict__ from, bool adds, ConvWeights shape, int across) {
  __shared__ Scalar elements[kTile];
  const Tile tile(shape, across);
#pragma unroll 4
  for (int i = threadIdx.x; i < tile.count; i += kThreads) {
    elements[tile.shared(i)] = from[tile.channels_last(i)];
  }
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < tile.count; i += kThreads) {
    Sum& sum = to[tile.contiguous(i)];
    const float value = to_float(elements[i]);
    sum = from_float<Sum>(adds ? to_float(sum) + value : value);
  }
}

/// Calls launch(shape, channels of a tile, blocks).
template <typename Launch>
int in_tiles(ConvWeights shape, const Launch& launch) {
  if (shape.positions < 1 || shape.positions > ConvWeights::kMostPositions) return cudaErrorInvalidValue;
  if (shape.positions == 1) shape = {.out = 1, .channels = shape.out * shape.channels, .positions = 1};
  if (shape.out * shape.channels == 0) return cudaSuccess;
  const auto fitting = static_cast<uint64_t>(kTile / shape.positions);
  const int64_t across = std::min(shape.channels, static_cast<int64_t>(std::bit_floor(fitting)));
  const dim3 blocks(static_cast<unsigned>(shape.out),
                    static_cast<unsigned>((shape.channels + across - 1) / across));
  launch(shape, static_cast<int>(across), blocks);
  return cudaGetLastError();
}

}  // namespace

int turn_conv_weights(void* to, const void* from, const ConvWeights& shape, Dtype dtype, void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    return in_tiles(shape, [&](const ConvWeights& tiled, int across, dim3 blocks) {
      turn_conv_weights<Scalar><<<blocks, kThreads, 0, as_stream(stream)>>>(
          static_cast<Scalar*>(to), static_cast<const Scalar*>(from), tiled, across);
    });
  });
}

int add_conv_weights(void* to, Dtype to_dtype, const void* from, bool adds, const ConvWeights& shape,
                     Dtype dtype, void* stream) {
  return dispatch_sum(dtype, to_dtype, [&](auto scalar, auto sum) {
    using Scalar = decltype(scalar);
    using Sum = decltype(sum);
    return in_tiles(shape, [&](const ConvWeights& tiled, int across, dim3 blocks) {
      add_conv_weights<Scalar, Sum><<<blocks, kThreads, 0, as_stream(stream)>>>(
          static_cast<Sum*>(to), static_cast<const Scalar*>(from), adds, tiled, across);
    });
  });
}

}  // namespace trireme::kernels::cuda
