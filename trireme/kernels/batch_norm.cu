// Batch normalisation of rows by channel with what follows it: the sum with a residual, ReLU. Two passes over
// memory each way: sums by channel, then the elements. Sums are taken in three steps, by threads over the
// rows of a chunk, by a block over its threads, and over the chunks, each in a fixed order.
#include <algorithm>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256, kBlocks = 4;  // of a multiprocessor
constexpr int64_t kSumBlocks = 4 * 132;     // constants, so that the order of sums does not depend on the GPU
constexpr int64_t kElementBlocks = 16 * 132;
constexpr int kFinalChannels = 8, kFinalRows = 64;

/// Threads of a block, `across` packs of channels by `down` rows, and blocks: columns by chunks of rows.
struct Tiles {
  int across, down;
  int64_t columns, chunks;

  Tiles(int64_t rows, int64_t packs, int64_t blocks) {
    across = 1;
    while (across < 32 && across < packs) across *= 2;
    down = kThreads / across;
    columns = (packs + across - 1) / across;
    chunks =
        std::clamp<int64_t>((rows + 4 * down - 1) / (4 * down), 1, std::max<int64_t>(1, blocks / columns));
  }
  dim3 grid() const { return {static_cast<unsigned>(columns), static_cast<unsigned>(chunks)}; }
  dim3 block() const { return {static_cast<unsigned>(across), static_cast<unsigned>(down)}; }
};

/// The pack of channels and the rows of a thread.
template <int kLanes>
struct Place {
  int64_t channel;
  uint32_t channels, first, step, end;  // 32 bits, as registers are few
  bool inside;

  __device__ Place(int64_t rows, int64_t row_channels)
      : channel((static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kLanes),
        channels(static_cast<uint32_t>(row_channels)),
        first(blockIdx.y * blockDim.y + threadIdx.y),
        step(gridDim.y * blockDim.y),
        end(static_cast<uint32_t>(rows)),
        inside(channel < row_channels) {}
  /// Neighbouring rows for each block, and the last rows for the first one: the sums, which all blocks take
  /// from the first rows to the last, have left those in the cache.
  __device__ static Place from_the_end(int64_t rows, int64_t channels) {
    Place place(rows, channels);
    const uint32_t each = (place.end + gridDim.y - 1) / gridDim.y;
    const uint32_t begin = (gridDim.y - 1 - blockIdx.y) * each;
    place.first = begin + threadIdx.y;
    place.step = blockDim.y;
    place.end = min(place.end, begin + each);
    return place;
  }
  __device__ int64_t offset(uint32_t row) const {
    return channel + static_cast<int64_t>(static_cast<uint64_t>(row) * channels);
  }
};

/// Calls body(what Loaded::load() has read, where) for a thread's rows in their order, of which kInFlight are
/// read at a time.
template <typename Loaded, int kInFlight, int kLanes, typename Call, typename Body>
__device__ void for_rows(const Place<kLanes>& place, const Call& call, const Body& body) {
#pragma unroll 1
  for (uint32_t row = place.first; row < place.end; row += kInFlight * place.step) {
    Loaded loaded[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (row + u * place.step < place.end) loaded[u].load(call, place.offset(row + u * place.step));
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (row + u * place.step < place.end) body(loaded[u], place.offset(row + u * place.step));
    }
  }
}

/// As for_rows(), but a row's registers are loaded again as soon as body() is done with it, so that kInFlight
/// loads are always under way. Loading a row before its registers are free would need a second set of them,
/// and a copy between the two that waits for the load.
template <typename Loaded, int kInFlight, int kLanes, typename Call, typename Body>
__device__ void for_rows_ahead(const Place<kLanes>& place, const Call& call, const Body& body) {
  Loaded loaded[kInFlight];
  const auto load = [&](int u, uint32_t row) {
    if (row < place.end) loaded[u].load(call, place.offset(row));
  };
#pragma unroll
  for (int u = 0; u < kInFlight; ++u) load(u, place.first + u * place.step);
#pragma unroll 1
  for (uint32_t row = place.first; row < place.end;) {
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      if (row >= place.end) return;
      body(loaded[u], place.offset(row));
      load(u, row + kInFlight * place.step);
      row += place.step;
    }
  }
}

/// Adds up the threads of a block that have the same channels, into row blockIdx.y of partial (chunks, 2, C).
template <int kLanes>
__device__ void store_sums(const float (&one)[kLanes], const float (&two)[kLanes], const Place<kLanes>& place,
                           int64_t channels, float* partial) {
  __shared__ float sums[2 * kLanes][kThreads];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int j = 0; j < kLanes; ++j) {
    sums[j][thread] = one[j];
    sums[kLanes + j][thread] = two[j];
  }
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y >= half) continue;
    for (int j = 0; j < 2 * kLanes; ++j) sums[j][thread] += sums[j][thread + half * blockDim.x];
  }
  if (threadIdx.y > 0 || !place.inside) return;
  float* const row = partial + static_cast<int64_t>(blockIdx.y) * 2 * channels + place.channel;
  for (int j = 0; j < kLanes; ++j) {
    row[j] = sums[j][thread];
    row[channels + j] = sums[kLanes + j][thread];
  }
}

/// The sums over the chunks, in the threads of the first row; `c` is a channel.
__device__ float2 total_of(const float* partial, int64_t chunks, int64_t channels, int64_t c) {
  __shared__ float2 sums[kFinalRows][kFinalChannels];
  const int row = threadIdx.y;
  float2 sum{0.0f, 0.0f};
  if (c < channels) {
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += kFinalRows) {
      sum.x += partial[chunk * 2 * channels + c];
      sum.y += partial[(chunk * 2 + 1) * channels + c];
    }
  }
  sums[row][threadIdx.x] = sum;
  for (int half = kFinalRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row >= half) continue;
    sums[row][threadIdx.x].x += sums[row + half][threadIdx.x].x;
    sums[row][threadIdx.x].y += sums[row + half][threadIdx.x].y;
  }
  return sums[row][threadIdx.x];
}

/// The inputs that forward reads of a row.
template <typename Scalar, int kLanes, bool kResidual>
struct Inputs {
  RawPack<Scalar, kLanes> x, residual;

  __device__ void load(const BatchNormForward& call, int64_t at) {
    x.load(static_cast<const Scalar*>(call.x) + at);
    if constexpr (kResidual) residual.load(static_cast<const Scalar*>(call.residual) + at);
  }
};

/// Sums of x - shift and of its squares, where shift is the first row: near the mean, so that little cancels.
template <typename Scalar, int kLanes>
__global__ void __launch_bounds__(kThreads, kBlocks) forward_sums(BatchNormForward call, float* partial) {
  const Place<kLanes> place(call.rows, call.channels);
  float one[kLanes] = {}, two[kLanes] = {};
  if (place.inside) {
    Pack<Scalar, kLanes> shift;
    shift.load(static_cast<const Scalar*>(call.x) + place.channel);
    using Row = Inputs<Scalar, kLanes, /*kResidual=*/false>;
    for_rows_ahead<Row, /*kInFlight=*/4>(place, call, [&](const Row& row, int64_t) {
      const auto x = row.x.pack();
      for (int j = 0; j < kLanes; ++j) {
        const float value = x[j] - shift[j];
        one[j] += value;
        two[j] += value * value;
      }
    });
  }
  store_sums(one, two, place, call.channels, partial);
}

// Rows of the statistics; scale * x + shift is the norm of x.
constexpr int kMean = 0, kRstd = 1, kScale = 2, kShift = 3;

/// A thread's values by channel, used for few rows: read in whole packs, all of them under way at once.
template <int kLanes>
struct PerChannel {
  float values[kLanes];

  __device__ PerChannel(const float* row, int64_t channel) {
    constexpr int kWidth = kFullPack<float>;
    static_assert(kLanes % kWidth == 0);
#pragma unroll
    for (int p = 0; p < kLanes / kWidth; ++p) {
      const auto part = reinterpret_cast<const float4*>(row + channel)[p];
      values[p * kWidth] = part.x;
      values[p * kWidth + 1] = part.y;
      values[p * kWidth + 2] = part.z;
      values[p * kWidth + 3] = part.w;
    }
  }
  __device__ float operator[](int lane) const {
    return values[lane];
  }
};

/// NaN stays.
__device__ float positive_part(float value) {
  return value < 0.0f ? 0.0f : value;
}

template <typename Scalar>
__global__ void __launch_bounds__(kFinalChannels* kFinalRows)
    forward_statistics(BatchNormForward call, const float* partial, int64_t chunks) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kFinalChannels + threadIdx.x, channels = call.channels;
  const float2 sum = total_of(partial, chunks, channels, c);
  if (threadIdx.y > 0 || c >= channels) return;
  const float rows = static_cast<float>(call.rows);
  const float shifted = sum.x / rows;
  const float mean = to_float(static_cast<const Scalar*>(call.x)[c]) + shifted;
  const float variance = positive_part(sum.y / rows - shifted * shifted);
  const float rstd = rsqrtf(variance + call.eps);
  const float scale = __fmul_rn(to_float(static_cast<const Scalar*>(call.weight)[c]), rstd);
  call.statistics[kMean * channels + c] = mean;
  call.statistics[kRstd * channels + c] = rstd;
  call.statistics[kScale * channels + c] = scale;
  call.statistics[kShift * channels + c] =
      __fmaf_rn(-mean, scale, to_float(static_cast<const Scalar*>(call.bias)[c]));
  if (c == 0 && call.batches != nullptr) ++*call.batches;
  if (call.running_mean == nullptr) return;
  const float unbiased = variance * (rows / (rows - 1.0f));
  call.running_mean[c] += call.momentum * (mean - call.running_mean[c]);
  call.running_var[c] += call.momentum * (unbiased - call.running_var[c]);
}

template <typename Scalar, int kLanes, bool kResidual, bool kRelu>
__global__ void __launch_bounds__(kThreads, kBlocks) forward_elements(BatchNormForward call) {
  const auto place = Place<kLanes>::from_the_end(call.rows, call.channels);
  if (!place.inside) return;
  const PerChannel<kLanes> scale(call.statistics + kScale * call.channels, place.channel);
  const PerChannel<kLanes> shift(call.statistics + kShift * call.channels, place.channel);
  using Row = Inputs<Scalar, kLanes, kResidual>;
  for_rows_ahead<Row, kResidual ? 2 : 4>(place, call, [&](const Row& row, int64_t at) {
    const auto x = row.x.pack();
    Pack<Scalar, kLanes> y;
    for (int j = 0; j < kLanes; ++j) {
      float value = __fmaf_rn(x[j], scale[j], shift[j]);
      if constexpr (kResidual) value += row.residual.pack()[j];
      if constexpr (kRelu) value = positive_part(value);
      y.set(j, value);
    }
    y.store(static_cast<Scalar*>(call.y) + at);
  });
}

/// The operations behind the norm.
enum class Behind { kNothing, kRelu, kResidualAndRelu };

/// The inputs that backward reads of a row.
template <typename Scalar, int kLanes, Behind kBehind>
struct Outputs {
  RawPack<Scalar, kLanes> x, dy, y;

  __device__ void load(const BatchNormBackward& call, int64_t at) {
    x.load(static_cast<const Scalar*>(call.x) + at);
    dy.load(static_cast<const Scalar*>(call.dy) + at);
    if constexpr (kBehind == Behind::kResidualAndRelu) y.load(static_cast<const Scalar*>(call.y) + at);
  }
};

/// The gradient of what the norm gave: of its outputs, where ReLU let them pass. Without a residual that is
/// seen from x, which is read anyway; scale and shift are used there alone.
template <typename Scalar, int kLanes, Behind kBehind>
__device__ Pack<Scalar, kLanes> norm_gradient(const Outputs<Scalar, kLanes, kBehind>& row,
                                              const PerChannel<kLanes>& scale,
                                              const PerChannel<kLanes>& shift) {
  const auto x = row.x.pack();
  auto gradient = row.dy.pack();
  for (int j = 0; j < kLanes; ++j) {
    if constexpr (kBehind == Behind::kRelu) {
      const Scalar seen = from_float<Scalar>(__fmaf_rn(x[j], scale[j], shift[j]));
      if (to_float(seen) <= 0.0f) gradient.set(j, 0.0f);
    } else if constexpr (kBehind == Behind::kResidualAndRelu) {
      if (row.y.pack()[j] <= 0.0f) gradient.set(j, 0.0f);
    }
  }
  return gradient;
}

/// Sums of the gradient and of its product with x - mean. Behind a residual the gradient is the residual's
/// too, and is stored: the elements then read it alone.
template <typename Scalar, int kLanes, Behind kBehind>
__global__ void __launch_bounds__(kThreads, kBlocks) backward_sums(BatchNormBackward call, float* partial) {
  __shared__ alignas(16) float means[32 * kLanes];  // of the block's channels, as registers are few
  const Place<kLanes> place(call.rows, call.channels);
  const int lane = static_cast<int>(threadIdx.x) * kLanes;
  if (threadIdx.y == 0 && place.inside) {
    for (int j = 0; j < kLanes; ++j)
      means[lane + j] = call.statistics[kMean * call.channels + place.channel + j];
  }
  __syncthreads();
  float one[kLanes] = {}, two[kLanes] = {};
  if (place.inside) {
    const PerChannel<kLanes> scale(call.statistics + kScale * call.channels, place.channel);
    const PerChannel<kLanes> shift(call.statistics + kShift * call.channels, place.channel);
    using Row = Outputs<Scalar, kLanes, kBehind>;
    for_rows<Row, /*kInFlight=*/2>(place, call, [&](const Row& row, int64_t at) {
      asm volatile("" ::: "memory");  // else the means are moved to registers
      const PerChannel<kLanes> mean(means, lane);
      const auto x = row.x.pack(), dz = norm_gradient(row, scale, shift);
      for (int j = 0; j < kLanes; ++j) {
        one[j] += dz[j];
        two[j] += dz[j] * (x[j] - mean[j]);
      }
      if constexpr (kBehind == Behind::kResidualAndRelu) dz.store(static_cast<Scalar*>(call.d_residual) + at);
    });
  }
  store_sums(one, two, place, call.channels, partial);
}

/// dx = scale * dz + scratch[0] * x + scratch[1].
template <typename Scalar>
__global__ void __launch_bounds__(kFinalChannels* kFinalRows)
    backward_coefficients(BatchNormBackward call, const float* partial, int64_t chunks) {
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kFinalChannels + threadIdx.x, channels = call.channels;
  const float2 sum = total_of(partial, chunks, channels, c);
  if (threadIdx.y > 0 || c >= channels) return;
  const float rows = static_cast<float>(call.rows);
  const float mean = call.statistics[kMean * channels + c], rstd = call.statistics[kRstd * channels + c];
  const auto put = [c](void* gradient, float value, bool adds) {
    Scalar& element = static_cast<Scalar*>(gradient)[c];
    element = from_float<Scalar>(adds ? to_float(element) + value : value);
  };
  put(call.d_weight, sum.y * rstd, call.adds_to_weight);
  put(call.d_bias, sum.x, call.adds_to_bias);
  const float scale = call.statistics[kScale * channels + c];
  const float slope = -scale * rstd * rstd * (sum.y / rows);
  call.scratch[c] = slope;
  call.scratch[channels + c] = -scale * (sum.x / rows) - slope * mean;
}

template <typename Scalar, int kLanes, Behind kBehind>
__global__ void __launch_bounds__(kThreads, kBlocks) backward_elements(BatchNormBackward call) {
  const auto place = Place<kLanes>::from_the_end(call.rows, call.channels);
  if (!place.inside) return;
  const PerChannel<kLanes> scale(call.statistics + kScale * call.channels, place.channel);
  const PerChannel<kLanes> shift(call.statistics + kShift * call.channels, place.channel);
  const PerChannel<kLanes> slope(call.scratch, place.channel);
  const PerChannel<kLanes> offset(call.scratch + call.channels, place.channel);
  using Row = Outputs<Scalar, kLanes, kBehind>;
  for_rows<Row, /*kInFlight=*/2>(place, call, [&](const Row& row, int64_t at) {
    const auto x = row.x.pack(), dz = norm_gradient(row, scale, shift);
    Pack<Scalar, kLanes> dx;
    for (int j = 0; j < kLanes; ++j) dx.set(j, scale[j] * dz[j] + (slope[j] * x[j] + offset[j]));
    dx.store(static_cast<Scalar*>(call.dx) + at);
  });
}

/// Calls body(bool constant) for `value`.
template <typename Body>
void with_constant(bool value, const Body& body) {
  value ? body(std::true_type{}) : body(std::false_type{});
}

template <typename Scalar>
int run_forward(const BatchNormForward& call, cudaStream_t stream) {
  constexpr int kLanes = kFullPack<Scalar>;
  const int64_t packs = call.channels / kLanes;
  const Tiles sums(call.rows, packs, kSumBlocks), elements(call.rows, packs, kElementBlocks);
  float* const partial = call.scratch;
  const dim3 final_grid(static_cast<unsigned>((call.channels + kFinalChannels - 1) / kFinalChannels));
  forward_sums<Scalar, kLanes><<<sums.grid(), sums.block(), 0, stream>>>(call, partial);
  forward_statistics<Scalar>
      <<<final_grid, dim3(kFinalChannels, kFinalRows), 0, stream>>>(call, partial, sums.chunks);
  with_constant(call.residual != nullptr, [&](auto residual) {
    with_constant(call.relu, [&](auto relu) {
      forward_elements<Scalar, kLanes, decltype(residual)::value, decltype(relu)::value>
          <<<elements.grid(), elements.block(), 0, stream>>>(call);
    });
  });
  return cudaGetLastError();
}

template <typename Scalar, Behind kBehind>
int run_backward(const BatchNormBackward& call, cudaStream_t stream) {
  constexpr int kLanes = kFullPack<Scalar>;
  const int64_t packs = call.channels / kLanes;
  const Tiles sums(call.rows, packs, kSumBlocks), elements(call.rows, packs, kElementBlocks);
  float* const partial = call.scratch + 2 * call.channels;
  const dim3 final_grid(static_cast<unsigned>((call.channels + kFinalChannels - 1) / kFinalChannels));
  backward_sums<Scalar, kLanes, kBehind><<<sums.grid(), sums.block(), 0, stream>>>(call, partial);
  backward_coefficients<Scalar>
      <<<final_grid, dim3(kFinalChannels, kFinalRows), 0, stream>>>(call, partial, sums.chunks);
  constexpr bool kStored = kBehind == Behind::kResidualAndRelu;
  BatchNormBackward rest = call;
  if (kStored) rest.dy = call.d_residual;
  backward_elements<Scalar, kLanes, kStored ? Behind::kNothing : kBehind>
      <<<elements.grid(), elements.block(), 0, stream>>>(rest);
  return cudaGetLastError();
}

}  // namespace

int64_t batch_norm_scratch(int64_t channels) {
  return (2 + 2 * kSumBlocks) * channels;
}

int batch_norm_forward(const BatchNormForward& call, Dtype dtype, void* stream) {
  return dispatch(dtype, [&](auto scalar) { return run_forward<decltype(scalar)>(call, as_stream(stream)); });
}

int batch_norm_backward(const BatchNormBackward& call, Dtype dtype, void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    if (!call.relu) return run_backward<Scalar, Behind::kNothing>(call, as_stream(stream));
    if (call.y == nullptr) return run_backward<Scalar, Behind::kRelu>(call, as_stream(stream));
    return run_backward<Scalar, Behind::kResidualAndRelu>(call, as_stream(stream));
  });
}

}  // namespace trireme::kernels::cuda
