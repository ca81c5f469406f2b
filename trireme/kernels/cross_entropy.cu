#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "trireme/kernels/cross_entropy.h"
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kUnroll = 4;  // packs that a thread has in flight

/// Row r has logits + r * stride; the first `cached` packs of it stay in shared memory between the two
/// passes, so that only the rest is read again.
template <typename Scalar>
struct Task {
  float* loss;
  Scalar* logits;
  const int64_t* targets;
  int64_t rows, classes, stride;
  float scale;
  bool want_gradient;
  int64_t cached = 0;
  uint8_t* narrow = nullptr;  ///< e5m2 (rows, stride), for gradients that do not go over the logits
};

/// Sets the lanes from `valid` on.
template <typename Scalar, int kLanes>
__device__ void fill_from(Pack<Scalar, kLanes>& pack, int64_t valid, float value) {
  if (valid >= kLanes) return;
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) {
    if (lane >= valid) pack.set(lane, value);
  }
}

/// One row as its block sees it. Thread t handles packs t, t + kThreads, ..., so that what it finds in the
/// cache is what it put there. kWhole says that all lanes of the pack are classes, which saves the bounds
/// check. kNarrow: gradients are e5m2, elsewhere.
template <typename Scalar, int kLanes, bool kNarrow>
class Row {
 public:
  using Values = Pack<Scalar, kLanes>;
  using RawValues = RawPack<Scalar, kLanes>;

  __device__ Row(const Task<Scalar>& task, int64_t row, void* cache)
      : logits_(task.logits + row * task.stride),
        cache_(static_cast<RawValues*>(cache)),
        classes_(task.classes),
        cached_(task.cached) {
    if constexpr (kNarrow) narrow_ = task.narrow + row * task.stride;
  }

  __device__ int64_t whole_packs() const { return classes_ / kLanes; }

  /// Pack `index`, -inf where there are no classes.
  template <bool kWhole>
  __device__ RawValues read(int64_t index) const {
    RawValues raw;
    if constexpr (kWhole) {
      raw.load(logits_ + index * kLanes);
    } else {
      Values values;
      if (valid(index) > 0) values.load(logits_ + index * kLanes);
      fill_from(values, valid(index), -INFINITY);
      raw.assign(values);
    }
    return raw;
  }
  __device__ void keep(int64_t index, const RawValues& raw) const {
    if (index < cached_) cache_[index] = raw;
  }
  template <bool kWhole>
  __device__ RawValues read_again(int64_t index) const {
    return index < cached_ ? cache_[index] : read<kWhole>(index);
  }
  /// Writes gradients of pack `index`, zero where there are no classes.
  template <bool kWhole>
  __device__ void write(int64_t index, const float (&gradients)[kLanes]) const {
    if constexpr (kNarrow) {
      struct alignas(kLanes) Bytes {
        __nv_fp8_storage_t lanes[kLanes];
      } bytes;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        bytes.lanes[lane] = narrowed(kWhole || lane < valid(index) ? gradients[lane] : 0.0f);
      }
      *reinterpret_cast<Bytes*>(narrow_ + index * kLanes) = bytes;
    } else {
      Values values;
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) values.set(lane, gradients[lane]);
      if constexpr (!kWhole) fill_from(values, valid(index), 0.0f);
      values.store(logits_ + index * kLanes);
    }
  }
  __device__ float logit(int64_t column) const {
    return to_float(logits_[column]);
  }
  __device__ void set(int64_t column, float gradient) const {
    if constexpr (kNarrow) {
      narrow_[column] = narrowed(gradient);
    } else {
      logits_[column] = from_float<Scalar>(gradient);
    }
  }

 private:
  __device__ int64_t valid(int64_t index) const {
    return classes_ - index * kLanes;
  }
  static __device__ __nv_fp8_storage_t narrowed(float gradient) {
    return __nv_cvt_float_to_fp8(gradient, __NV_SATFINITE, __NV_E5M2);
  }

  Scalar* logits_;
  uint8_t* narrow_ = nullptr;
  RawValues* cache_;
  int64_t classes_, cached_;
};

/// body(first, whole) for the packs first, first + kThreads, ..., kUnroll of them, of each turn of this
/// thread; `whole` is a std::true_type where all lanes of all of them are classes.
template <int kThreads, typename Scalar, int kLanes, bool kNarrow, typename Body>
__device__ void for_groups(const Row<Scalar, kLanes, kNarrow>& row, int64_t packs, const Body& body) {
  const int64_t whole = row.whole_packs() - (kUnroll - 1) * kThreads;
  for (int64_t first = threadIdx.x; first < packs; first += kUnroll * kThreads) {
    if (first < whole) {
      body(first, std::true_type{});
    } else {
      body(first, std::false_type{});
    }
  }
}

/// What softmax subtracts before it exponentiates: 0 for a row of -inf alone, where -inf - -inf would be NaN.
__device__ float reference(float top) {
  return top == -INFINITY ? 0.0f : top;
}

/// The largest of some logits and the sum of exp(logit - reference(top)) over them.
struct Statistics {
  float top = -INFINITY;
  float sum = 0.0f;
};

template <typename Scalar, int kLanes>
__device__ void accumulate(Statistics& so_far, const RawPack<Scalar, kLanes> (&group)[kUnroll]) {
  float top = so_far.top;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Pack<Scalar, kLanes> values = group[u].pack();
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) top = fmaxf(top, values[lane]);
  }
  const float shift = reference(top);
  float sum = so_far.sum * exponential<Scalar>(so_far.top - shift);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const Pack<Scalar, kLanes> values = group[u].pack();
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) sum += exponential<Scalar>(values[lane] - shift);
  }
  so_far = {top, sum};
}

template <int kThreads>
__device__ float block_max(float value, float* shared) {
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float top = shared[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) top = fmaxf(top, shared[warp]);
  return top;
}

/// The statistics of the row, in every thread of the block.
template <int kThreads, typename Scalar, int kLanes, bool kNarrow>
__device__ Statistics first_pass(const Row<Scalar, kLanes, kNarrow>& row, int64_t packs) {
  __shared__ alignas(16) float tops[kThreads / 32], sums[kThreads / 32];
  Statistics mine;
  for_groups<kThreads>(row, packs, [&](int64_t first, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    RawPack<Scalar, kLanes> group[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) group[u] = row.template read<kWhole>(first + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) row.keep(first + u * kThreads, group[u]);
    accumulate(mine, group);
  });
  const float top = block_max<kThreads>(mine.top, tops);
  const float sum = mine.sum * exponential<Scalar>(mine.top - reference(top));
  return {top, block_sum<kThreads>(sum, sums)};
}

/// The gradients of the row become factor * exp(logit - shift), padding included.
template <int kThreads, typename Scalar, int kLanes, bool kNarrow>
__device__ void second_pass(const Row<Scalar, kLanes, kNarrow>& row, int64_t packs, float shift,
                            float factor) {
  for_groups<kThreads>(row, packs, [&](int64_t first, auto whole) {
    constexpr bool kWhole = decltype(whole)::value;
    RawPack<Scalar, kLanes> group[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) group[u] = row.template read_again<kWhole>(first + u * kThreads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (!kWhole && first + u * kThreads >= packs) continue;
      const Pack<Scalar, kLanes> values = group[u].pack();
      float gradients[kLanes];
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) {
        gradients[lane] = factor * exponential<Scalar>(values[lane] - shift);
      }
      row.template write<kWhole>(first + u * kThreads, gradients);
    }
  });
}

/// The gradients of all classes become `value`, of padding zero.
template <int kThreads, typename Scalar, int kLanes, bool kNarrow>
__device__ void write_everywhere(const Row<Scalar, kLanes, kNarrow>& row, int64_t packs, float value) {
  float values[kLanes];
#pragma unroll
  for (int lane = 0; lane < kLanes; ++lane) values[lane] = value;
  for (int64_t index = threadIdx.x; index < packs; index += kThreads)
    row.template write<false>(index, values);
}

/// One block per row.
template <int kThreads, int kLanes, bool kNarrow, typename Scalar>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) cross_entropy_rows(Task<Scalar> task) {
  extern __shared__ int4 cache[];
  const Row<Scalar, kLanes, kNarrow> row(task, blockIdx.x, cache);
  const int64_t target = task.targets[blockIdx.x];
  const int64_t packs = task.stride / kLanes;
  if (target < 0 || target >= task.classes) {
    const float everywhere = target == kIgnoredTarget ? 0.0f : NAN;
    if (threadIdx.x == 0) task.loss[blockIdx.x] = everywhere;
    if (task.want_gradient) write_everywhere<kThreads>(row, packs, everywhere);
    return;
  }
  const float target_logit = row.logit(target);
  const auto [top, sum] = first_pass<kThreads>(row, (task.classes + kLanes - 1) / kLanes);
  if (threadIdx.x == 0) task.loss[blockIdx.x] = logf(sum) + (top - target_logit);
  if (!task.want_gradient) return;
  const float shift = reference(top);
  second_pass<kThreads>(row, packs, shift, task.scale / sum);
  __syncthreads();  // the target's gradient goes over what another thread wrote
  if (threadIdx.x == 0) {
    row.set(target, task.scale * (exponential<Scalar>(target_logit - shift) / sum - 1.0f));
  }
}

template <int kThreads, int kLanes, bool kNarrow, typename Scalar>
int launch(const Task<Scalar>& task, int64_t cache_bytes, void* stream) {
  const auto kernel = cross_entropy_rows<kThreads, kLanes, kNarrow, Scalar>;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(cache_bytes));
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(task.rows), kThreads, static_cast<size_t>(cache_bytes), as_stream(stream)>>>(
      task);
  return cudaGetLastError();
}

/// Bytes of shared memory that one block may ask for.
int64_t shared_limit() {
  constexpr int64_t kOther = 2048;  // the statistics, and what CUDA keeps in each block
  int device = 0, bytes = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) != cudaSuccess)
    return 0;
  return bytes - kOther;
}

template <int kLanes, bool kNarrow, typename Scalar>
int launch_with_cache(Task<Scalar> task, void* stream) {
  constexpr int64_t kPackBytes = kLanes * static_cast<int64_t>(sizeof(Scalar));
  const int64_t limit = shared_limit();
  const int64_t row_packs = (task.classes + kLanes - 1) / kLanes;
  task.cached = task.want_gradient ? std::min(row_packs, limit / kPackBytes) : 0;
  const int64_t cache_bytes = task.cached * kPackBytes;
  // Where a multiprocessor's shared memory has room for two rows, their two passes overlap.
  return cache_bytes > limit / 2 ? launch<1024, kLanes, kNarrow>(task, cache_bytes, stream)
                                 : launch<512, kLanes, kNarrow>(task, cache_bytes, stream);
}

}  // namespace

int cross_entropy(float* loss, void* logits, const int64_t* targets, int64_t rows, int64_t classes,
                  int64_t stride, float scale, bool want_gradient, Dtype dtype, void* stream) {
  if (rows == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Task<Scalar> task{loss,         static_cast<Scalar*>(logits), targets, rows, classes, stride, scale,
                            want_gradient};
    const bool packed = packs({logits}, stride * static_cast<int64_t>(sizeof(Scalar)));
    return packed ? launch_with_cache<kFullPack<Scalar>, false>(task, stream)
                  : launch_with_cache<1, false>(task, stream);
  });
}

int cross_entropy_fp8(float* loss, void* gradients, const void* logits, const int64_t* targets, int64_t rows,
                      int64_t classes, int64_t stride, void* stream) {
  using Scalar = __nv_bfloat16;
  if (rows == 0) return cudaSuccess;
  if (!packs({logits}, stride * static_cast<int64_t>(sizeof(Scalar)))) return cudaErrorInvalidValue;
  const Task<Scalar> task{.loss = loss,
                          .logits = static_cast<Scalar*>(const_cast<void*>(logits)),
                          .targets = targets,
                          .rows = rows,
                          .classes = classes,
                          .stride = stride,
                          .scale = largest(Fp8Format::kE5m2),
                          .want_gradient = true,
                          .narrow = static_cast<uint8_t*>(gradients)};
  return launch_with_cache<kFullPack<Scalar>, true>(task, stream);
}

}  // namespace trireme::kernels::cuda
