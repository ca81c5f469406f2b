// Maxima over windows of channels-last images. Backward gathers: each input adds up the windows that took it,
// in their order, so the same input gives the same bits.
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <typename Scalar, int kLanes>
__global__ void __launch_bounds__(kThreads)
    pool_forward(MaxPool call, Scalar* y, uint8_t* taken, const Scalar* x) {
  const int64_t packs = call.channels / kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= call.images * call.out_height * call.out_width * packs) return;
  const int64_t channel = index % packs * kLanes, position = index / packs;
  const int64_t column = position % call.out_width, row = position / call.out_width % call.out_height;
  const Scalar* const image =
      x + position / (call.out_width * call.out_height) * call.height * call.width * call.channels;
  float best[kLanes];
  uint8_t from[kLanes];
  bool any = false;
  for (int64_t i = 0; i < call.kernel; ++i) {
    const int64_t in_row = row * call.stride - call.padding + i;
    if (in_row < 0 || in_row >= call.height) continue;
    for (int64_t j = 0; j < call.kernel; ++j) {
      const int64_t in_column = column * call.stride - call.padding + j;
      if (in_column < 0 || in_column >= call.width) continue;
      Pack<Scalar, kLanes> values;
      values.load(image + (in_row * call.width + in_column) * call.channels + channel);
      const auto place = static_cast<uint8_t>(i * call.kernel + j);
      for (int lane = 0; lane < kLanes; ++lane) {
        const float value = values[lane];
        if (any && !(value > best[lane] || isnan(value))) continue;
        best[lane] = value;
        from[lane] = place;
      }
      any = true;
    }
  }
  Pack<Scalar, kLanes> out;
  Pack<uint8_t, kLanes> places;
  for (int lane = 0; lane < kLanes; ++lane) {
    out.set(lane, best[lane]);
    places.lanes[lane] = from[lane];
  }
  out.store(y + index * kLanes);
  places.store(taken + index * kLanes);
}

template <typename Scalar, int kLanes>
__global__ void __launch_bounds__(kThreads)
    pool_backward(MaxPool call, Scalar* dx, const Scalar* dy, const uint8_t* taken) {
  const int64_t packs = call.channels / kLanes;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= call.images * call.height * call.width * packs) return;
  const int64_t channel = index % packs * kLanes, position = index / packs;
  const int64_t column = position % call.width, row = position / call.width % call.height;
  const int64_t first = position / (call.width * call.height) * call.out_height * call.out_width;
  float sum[kLanes] = {};
  for (int64_t i = call.kernel - 1; i >= 0; --i) {
    const int64_t down = row + call.padding - i;
    if (down < 0 || down % call.stride != 0 || down / call.stride >= call.out_height) continue;
    for (int64_t j = call.kernel - 1; j >= 0; --j) {
      const int64_t across = column + call.padding - j;
      if (across < 0 || across % call.stride != 0 || across / call.stride >= call.out_width) continue;
      const int64_t at =
          (first + down / call.stride * call.out_width + across / call.stride) * call.channels + channel;
      Pack<Scalar, kLanes> gradient;
      Pack<uint8_t, kLanes> places;
      gradient.load(dy + at);
      places.load(taken + at);
      const auto place = static_cast<uint8_t>(i * call.kernel + j);
      for (int lane = 0; lane < kLanes; ++lane) {
        if (places.lanes[lane] == place) sum[lane] += gradient[lane];
      }
    }
  }
  Pack<Scalar, kLanes> out;
  for (int lane = 0; lane < kLanes; ++lane) out.set(lane, sum[lane]);
  out.store(dx + index * kLanes);
}

unsigned blocks_for(int64_t packs) {
  return static_cast<unsigned>((packs + kThreads - 1) / kThreads);
}

}  // namespace

int max_pool_forward(const MaxPool& call, void* y, uint8_t* taken, const void* x, Dtype dtype, void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kLanes = kFullPack<Scalar>;
    const int64_t packs = call.images * call.out_height * call.out_width * call.channels / kLanes;
    pool_forward<Scalar, kLanes><<<blocks_for(packs), kThreads, 0, as_stream(stream)>>>(
        call, static_cast<Scalar*>(y), taken, static_cast<const Scalar*>(x));
    return static_cast<int>(cudaGetLastError());
  });
}

int max_pool_backward(const MaxPool& call, void* dx, const void* dy, const uint8_t* taken, Dtype dtype,
                      void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kLanes = kFullPack<Scalar>;
    const int64_t packs = call.images * call.height * call.width * call.channels / kLanes;
    pool_backward<Scalar, kLanes><<<blocks_for(packs), kThreads, 0, as_stream(stream)>>>(
        call, static_cast<Scalar*>(dx), static_cast<const Scalar*>(dy), taken);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace trireme::kernels::cuda
