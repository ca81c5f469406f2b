// Maxima over windows of channels-last images. Backward gathers: each input adds up the windows that took it,
// in their order, so the same input gives the same bits.
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// Where a thread is in a plane of packs: 64-bit divisions would take longer than the memory traffic.
struct Place {
  int row, column, channel;

  template <int kLanes>
  static __device__ Place at(unsigned index, unsigned packs, unsigned width) {
    const unsigned position = index / packs;
    return {static_cast<int>(position / width), static_cast<int>(position % width),
            static_cast<int>(index % packs * kLanes)};
  }
};

template <typename Scalar, int kLanes>
__global__ void __launch_bounds__(kThreads)
    pool_forward(MaxPool call, Scalar* y, uint8_t* taken, const Scalar* x) {
  const unsigned packs = call.channels / kLanes, index = blockIdx.x * kThreads + threadIdx.x;
  const int kernel = call.kernel, height = call.height, width = call.width;
  if (index >= static_cast<unsigned>(call.out_height * call.out_width) * packs) return;
  const Place to = Place::at<kLanes>(index, packs, call.out_width);
  const int top = to.row * static_cast<int>(call.stride) - static_cast<int>(call.padding);
  const int left = to.column * static_cast<int>(call.stride) - static_cast<int>(call.padding);
  for (int64_t image = blockIdx.y; image < call.images; image += gridDim.y) {
    const Scalar* const plane = x + image * height * width * call.channels + to.channel;
    float best[kLanes];
    uint8_t from[kLanes];
    bool any = false;
    for (int i = max(0, -top); i < min(kernel, height - top); ++i) {
      for (int j = max(0, -left); j < min(kernel, width - left); ++j) {
        Pack<Scalar, kLanes> values;
        values.load(plane + (static_cast<int64_t>(top + i) * width + left + j) * call.channels);
        const auto place = static_cast<uint8_t>(i * kernel + j);
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
    const int64_t at = (image * call.out_height * call.out_width * packs + index) * kLanes;
    out.store(y + at);
    places.store(taken + at);
  }
}

// The windows along one side that hold a place of the input: from first to last.
struct Windows {
  int first, last;

  __device__ Windows(int place, int kernel, int stride, int windows)
      : first(place < kernel ? 0 : (place - kernel) / stride + 1), last(min(place / stride, windows - 1)) {}
};

template <typename Scalar, int kLanes>
__global__ void __launch_bounds__(kThreads)
    pool_backward(MaxPool call, Scalar* dx, const Scalar* dy, const uint8_t* taken) {
  const unsigned packs = call.channels / kLanes, index = blockIdx.x * kThreads + threadIdx.x;
  const int kernel = call.kernel, stride = call.stride, padding = call.padding, out_width = call.out_width;
  if (index >= static_cast<unsigned>(call.height * call.width) * packs) return;
  const Place to = Place::at<kLanes>(index, packs, call.width);
  const Windows down(to.row + padding, kernel, stride, call.out_height);
  const Windows across(to.column + padding, kernel, stride, out_width);
  for (int64_t image = blockIdx.y; image < call.images; image += gridDim.y) {
    const int64_t plane = image * call.out_height * out_width * call.channels + to.channel;
    float sum[kLanes] = {};
    for (int row = down.first; row <= down.last; ++row) {
      for (int column = across.first; column <= across.last; ++column) {
        const int64_t at = plane + (static_cast<int64_t>(row) * out_width + column) * call.channels;
        Pack<Scalar, kLanes> gradient;
        Pack<uint8_t, kLanes> places;
        gradient.load(dy + at);
        places.load(taken + at);
        const auto place = static_cast<uint8_t>((to.row + padding - row * stride) * kernel + to.column +
                                                padding - column * stride);
        for (int lane = 0; lane < kLanes; ++lane) {
          if (places.lanes[lane] == place) sum[lane] += gradient[lane];
        }
      }
    }
    Pack<Scalar, kLanes> out;
    for (int lane = 0; lane < kLanes; ++lane) out.set(lane, sum[lane]);
    out.store(dx + (image * call.height * call.width * packs + index) * kLanes);
  }
}

// A grid of the blocks of a plane by images; its second side cannot be longer than kLongest.
dim3 grid_for(int64_t packs_of_plane, int64_t images) {
  constexpr int64_t kLongest = 65535;
  return {static_cast<unsigned>((packs_of_plane + kThreads - 1) / kThreads),
          static_cast<unsigned>(images < kLongest ? images : kLongest)};
}

}  // namespace

int max_pool_forward(const MaxPool& call, void* y, uint8_t* taken, const void* x, Dtype dtype, void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kLanes = kFullPack<Scalar>;
    const dim3 grid = grid_for(call.out_height * call.out_width * call.channels / kLanes, call.images);
    pool_forward<Scalar, kLanes><<<grid, kThreads, 0, as_stream(stream)>>>(
        call, static_cast<Scalar*>(y), taken, static_cast<const Scalar*>(x));
    return static_cast<int>(cudaGetLastError());
  });
}

int max_pool_backward(const MaxPool& call, void* dx, const void* dy, const uint8_t* taken, Dtype dtype,
                      void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr int kLanes = kFullPack<Scalar>;
    const dim3 grid = grid_for(call.height * call.width * call.channels / kLanes, call.images);
    pool_backward<Scalar, kLanes><<<grid, kThreads, 0, as_stream(stream)>>>(
        call, static_cast<Scalar*>(dx), static_cast<const Scalar*>(dy), taken);
    return static_cast<int>(cudaGetLastError());
  });
}

}  // namespace trireme::kernels::cuda
