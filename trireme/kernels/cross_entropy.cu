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
  const Scalar* logits;  ///< plain loads alone: others could be moved behind writes to the same memory
  const int64_t* targets;
  int64_t rows, classes, stride;
  float scale;
  bool want_gradient;
  int64_t cached = 0;
  uint8_t* narrow = nullptr;  ///< e5m2 (rows, stride), for gradients that do not go over the logits
  Scalar* out = nullptr;      ///< (rows, stride), where what is made of the logits goes; may be these
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
        out_(task.out + row * task.stride),
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
      values.store(out_ + index * kLanes);
    }
  }
  __device__ float logit(int64_t column) const {
    return to_float(logits_[column]);
  }
  __device__ void set(int64_t column, float gradient) const {
    if constexpr (kNarrow) {
      narrow_[column] = narrowed(gradient);
    } else {
      out_[column] = from_float<Scalar>(gradient);
    }
  }

 private:
  __device__ int64_t valid(int64_t index) const {
    return classes_ - index * kLanes;
  }
  static __device__ __nv_fp8_storage_t narrowed(float gradient) {
    return __nv_cvt_float_to_fp8(gradient, __NV_SATFINITE, __NV_E5M2);
  }

  const Scalar* logits_;
  Scalar* out_;
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

/// The number that softmax subtracts before it exponentiates: 0 for a row of -inf alone, where -inf - -inf
/// would be NaN.
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

/// Writes the row's gradients as factor * exp(logit - shift), and 0 in padding.
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

/// Writes `value` as the gradient of every class, and 0 in padding.
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

/// A part of a vocabulary, from class `first` on, and what is found out of its logits by token.
struct Part {
  int64_t first;
  float *top, *sum, *target;
};
/// A part whose statistics of the whole vocabulary are known; `scale` is that of the token's loss.
struct GivenPart {
  int64_t first;
  const float *top, *sum, *scale;
};

/// One block per row; task.out are exponentials, or with want_gradient false there are none.
template <int kThreads, int kLanes, typename Scalar>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    vocabulary_part_rows(Task<Scalar> task, Part part) {
  extern __shared__ int4 cache[];
  const Row<Scalar, kLanes, false> row(task, blockIdx.x, cache);
  const int64_t target = task.targets[blockIdx.x] - part.first;
  const bool here = target >= 0 && target < task.classes;
  const auto [top, sum] = first_pass<kThreads>(row, (task.classes + kLanes - 1) / kLanes);
  if (threadIdx.x == 0) {
    const float logit = here ? row.logit(target) : -INFINITY;
    part.top[blockIdx.x] = top;
    part.sum[blockIdx.x] = sum;
    part.target[blockIdx.x] = here && logit == -INFINITY ? NAN : logit;
  }
  if (!task.want_gradient) return;
  second_pass<kThreads>(row, task.stride / kLanes, reference(top), 1.0f);
  __syncthreads();  // the target's goes over what another thread wrote
  if (here && threadIdx.x == 0) row.set(target, 0.0f);
}

/// One block per row.
template <int kThreads, int kLanes, typename Scalar>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads)
    vocabulary_gradient_rows(Task<Scalar> task, GivenPart part) {
  const Row<Scalar, kLanes, false> row(task, blockIdx.x, nullptr);
  const int64_t target = task.targets[blockIdx.x] - part.first, packs = task.stride / kLanes;
  const float top = part.top[blockIdx.x], scale = part.scale[blockIdx.x];
  if (scale == 0.0f) return write_everywhere<kThreads>(row, packs, 0.0f);  // whatever the logits are
  const float factor = scale / part.sum[blockIdx.x];
  const bool is_here = 0 <= target && target < task.classes;
  const float of_target = is_here ? row.logit(target) : 0.0f;
  __syncthreads();  // gradients may be written over logits
  second_pass<kThreads>(row, packs, top, factor);
  if (!is_here) return;
  __syncthreads();  // the target's gradient goes over what another thread wrote
  if (threadIdx.x == 0) row.set(target, factor * exponential<Scalar>(of_target - top) - scale);
}

template <typename Kernel, typename Scalar, typename... More>
int launch(Kernel* kernel, int threads, const Task<Scalar>& task, int64_t cache_bytes, void* stream,
           const More&... more) {
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(cache_bytes));
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<unsigned>(task.rows), static_cast<unsigned>(threads), static_cast<size_t>(cache_bytes),
           as_stream(stream)>>>(task, more...);
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

/// body(threads, cache bytes) for kernels of 1024 or 512 threads, whose number is a constant.
template <int kLanes, typename Scalar, typename Body>
int with_cache(Task<Scalar>& task, const Body& body) {
  constexpr int64_t kPackBytes = kLanes * static_cast<int64_t>(sizeof(Scalar));
  const int64_t limit = shared_limit();
  const int64_t row_packs = (task.classes + kLanes - 1) / kLanes;
  task.cached = task.want_gradient ? std::min(row_packs, limit / kPackBytes) : 0;
  const int64_t cache_bytes = task.cached * kPackBytes;
  // Where a multiprocessor's shared memory has room for two rows, their two passes overlap.
  return cache_bytes > limit / 2 ? body(std::integral_constant<int, 1024>{}, cache_bytes)
                                 : body(std::integral_constant<int, 512>{}, cache_bytes);
}

template <int kLanes, bool kNarrow, typename Scalar>
int launch_rows(Task<Scalar> task, void* stream) {
  return with_cache<kLanes>(task, [&](auto threads, int64_t cache_bytes) {
    constexpr int kThreads = decltype(threads)::value;
    return launch(cross_entropy_rows<kThreads, kLanes, kNarrow, Scalar>, kThreads, task, cache_bytes, stream);
  });
}

template <int kLanes, typename Scalar>
int launch_part(Task<Scalar> task, const Part& part, void* stream) {
  return with_cache<kLanes>(task, [&](auto threads, int64_t cache_bytes) {
    constexpr int kThreads = decltype(threads)::value;
    return launch(vocabulary_part_rows<kThreads, kLanes, Scalar>, kThreads, task, cache_bytes, stream, part);
  });
}

/// One block per token, which adds up what all parts of the vocabulary have of its gradient.
template <int kThreads, int kLanes, typename Scalar>
__global__ void vocabulary_join_rows(Scalar* gradient, VocabularyMessages messages, const float* factors,
                                     const float* of_target, const float* scale, int64_t tokens,
                                     int64_t width) {
  const int64_t token = blockIdx.x;
  const float target = of_target[token];
  const bool ignored = scale[token] == 0.0f;
  for (int64_t column = threadIdx.x * kLanes; column < width; column += kThreads * kLanes) {
    float sums[kLanes] = {};
    for (int part = 0; part < messages.count; ++part) {
      const auto* const row = static_cast<const Scalar*>(messages.data[part]) + token * messages.stride;
      const float factor = factors[part * tokens + token];
      Pack<Scalar, kLanes> others, of_row;
      others.load(row + column);
      of_row.load(row + width + column);
#pragma unroll
      for (int lane = 0; lane < kLanes; ++lane) sums[lane] += others[lane] * factor + of_row[lane] * target;
    }
    Pack<Scalar, kLanes> result;
#pragma unroll
    for (int lane = 0; lane < kLanes; ++lane) result.set(lane, ignored ? 0.0f : sums[lane]);
    result.store(gradient + token * width + column);
  }
}

}  // namespace

int cross_entropy(float* loss, void* logits, const int64_t* targets, int64_t rows, int64_t classes,
                  int64_t stride, float scale, bool want_gradient, Dtype dtype, void* stream) {
  if (rows == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Task<Scalar> task{.loss = loss,
                            .logits = static_cast<Scalar*>(logits),
                            .targets = targets,
                            .rows = rows,
                            .classes = classes,
                            .stride = stride,
                            .scale = scale,
                            .want_gradient = want_gradient,
                            .out = static_cast<Scalar*>(logits)};
    const bool packed = packs({logits}, stride * static_cast<int64_t>(sizeof(Scalar)));
    return packed ? launch_rows<kFullPack<Scalar>, false>(task, stream) : launch_rows<1, false>(task, stream);
  });
}

int cross_entropy_fp8(float* loss, void* gradients, const void* logits, const int64_t* targets, int64_t rows,
                      int64_t classes, int64_t stride, void* stream) {
  using Scalar = __nv_bfloat16;
  if (rows == 0) return cudaSuccess;
  if (!packs({logits}, stride * static_cast<int64_t>(sizeof(Scalar)))) return cudaErrorInvalidValue;
  const Task<Scalar> task{.loss = loss,
                          .logits = static_cast<const Scalar*>(logits),
                          .targets = targets,
                          .rows = rows,
                          .classes = classes,
                          .stride = stride,
                          .scale = largest(Fp8Format::kE5m2),
                          .want_gradient = true,
                          .narrow = static_cast<uint8_t*>(gradients)};
  return launch_rows<kFullPack<Scalar>, true>(task, stream);
}

int vocabulary_part(void* powers, float* top, float* sum, float* target, const void* logits,
                    const int64_t* targets, int64_t first, int64_t rows, int64_t classes, Dtype dtype,
                    void* stream) {
  if (rows == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Task<Scalar> task{.logits = static_cast<const Scalar*>(logits),
                            .targets = targets,
                            .rows = rows,
                            .classes = classes,
                            .stride = classes,
                            .want_gradient = powers != nullptr,
                            .out = static_cast<Scalar*>(powers)};
    const Part part{.first = first, .top = top, .sum = sum, .target = target};
    const bool packed = packs({logits, powers}, classes * static_cast<int64_t>(sizeof(Scalar)));
    return packed ? launch_part<kFullPack<Scalar>>(task, part, stream) : launch_part<1>(task, part, stream);
  });
}

int vocabulary_part_gradient(void* gradients, const void* logits, const int64_t* targets, int64_t first,
                             const float* top, const float* sum, const float* scale, int64_t rows,
                             int64_t classes, Dtype dtype, void* stream) {
  constexpr int kThreads = 512;
  if (rows == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    const Task<Scalar> task{.logits = static_cast<const Scalar*>(logits),
                            .targets = targets,
                            .rows = rows,
                            .classes = classes,
                            .stride = classes,
                            .out = static_cast<Scalar*>(gradients)};
    const GivenPart part{.first = first, .top = top, .sum = sum, .scale = scale};
    const bool packed = packs({logits, gradients}, classes * static_cast<int64_t>(sizeof(Scalar)));
    return packed ? launch(vocabulary_gradient_rows<kThreads, kFullPack<Scalar>, Scalar>, kThreads, task, 0,
                           stream, part)
                  : launch(vocabulary_gradient_rows<kThreads, 1, Scalar>, kThreads, task, 0, stream, part);
  });
}

int join_vocabulary(void* gradient, const VocabularyMessages& messages, const float* factors,
                    const float* of_target, const float* scale, int64_t tokens, int64_t width, Dtype dtype,
                    void* stream) {
  constexpr int kThreads = 256;
  if (tokens == 0) return cudaSuccess;
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    constexpr auto kBytes = static_cast<int64_t>(sizeof(Scalar));
    bool packed = packs({gradient}, width * kBytes) && packs({}, messages.stride * kBytes);
    for (int part = 0; part < messages.count; ++part) packed = packed && packs({messages.data[part]}, 0);
    const auto kernel = packed ? vocabulary_join_rows<kThreads, kFullPack<Scalar>, Scalar>
                               : vocabulary_join_rows<kThreads, 1, Scalar>;
    kernel<<<static_cast<unsigned>(tokens), kThreads, 0, as_stream(stream)>>>(
        static_cast<Scalar*>(gradient), messages, factors, of_target, scale, tokens, width);
    return cudaGetLastError();
  });
}

}  // namespace trireme::kernels::cuda
