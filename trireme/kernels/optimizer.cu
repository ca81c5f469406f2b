// AdamW and SGD over flat ranges in one pass, and the sum of squares for clipping.
#include <algorithm>
#include <cmath>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLanes = 4;

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ int64_t thread_count() {
  return static_cast<int64_t>(gridDim.x) * kThreads;
}

// Rules: the new parameter, and the new state in place. Every product that is added is an explicit fmaf,
// every other one cannot be fused, so that an element gets the same bits wherever it lies.

struct AdamW {
  static constexpr int kStates = 2;  ///< exp_avg, exp_avg_sq
  float keep, step_size, inverse_root, blend1, beta2, blend2, eps;

  explicit AdamW(const AdamWStep& step)
      : keep(1.0f - step.lr * step.weight_decay),
        step_size(step.lr / step.bias_correction1),
        inverse_root(1.0f / std::sqrt(step.bias_correction2)),
        blend1(1.0f - step.beta1),
        beta2(step.beta2),
        blend2(1.0f - step.beta2),
        eps(step.eps) {}

  __device__ float operator()(float param, float grad, float (&state)[kStates]) const {
    const float m = fmaf(grad - state[0], blend1, state[0]);
    const float v = fmaf(state[1], beta2, __fmul_rn(__fmul_rn(grad, grad), blend2));
    state[0] = m;
    state[1] = v;
    return fmaf(param, keep, -(__fmul_rn(step_size, m) / fmaf(sqrtf(v), inverse_root, eps)));
  }
};

struct Sgd {
  static constexpr int kStates = 1;  ///< momentum_buffer
  float lr, momentum, weight_decay;
  bool first;

  explicit Sgd(const SgdStep& step)
      : lr(step.lr), momentum(step.momentum), weight_decay(step.weight_decay), first(step.first) {}

  __device__ float operator()(float param, float grad, float (&state)[kStates]) const {
    const float g = fmaf(weight_decay, param, grad);
    state[0] = first ? g : fmaf(momentum, state[0], g);  // at first the buffer may hold anything
    return fmaf(-lr, state[0], param);
  }
};

// One pass over the range.

template <typename Rule>
struct Range {
  float* param;
  float* state[Rule::kStates];
  const float* grad;
  void* copy;  ///< or nullptr
  int64_t count;
  float scale;
  const float* grad_scale;  ///< or nullptr
};

template <int kWidth, typename Copy, typename Rule>
__device__ void update(const Range<Rule>& range, const Rule& rule, float scale, int64_t at) {
  Pack<float, kWidth> param, grad, state[Rule::kStates];
  param.load(range.param + at);
  grad.load_streaming(range.grad + at);
  for (int s = 0; s < Rule::kStates; ++s) state[s].load_streaming(range.state[s] + at);

  Pack<Copy, kWidth> copy;
  for (int j = 0; j < kWidth; ++j) {
    float values[Rule::kStates];
    for (int s = 0; s < Rule::kStates; ++s) values[s] = state[s][j];
    const float next = rule(param[j], __fmul_rn(grad[j], scale), values);
    for (int s = 0; s < Rule::kStates; ++s) state[s].set(j, values[s]);
    param.set(j, next);
    copy.set(j, next);
  }

  param.store(range.param + at);
  for (int s = 0; s < Rule::kStates; ++s) state[s].store_streaming(range.state[s] + at);
  if (range.copy != nullptr) copy.store(static_cast<Copy*>(range.copy) + at);
}

/// Packs from the element `head` on, and one by one what lies before and after them.
template <typename Copy, typename Rule>
__global__ void __launch_bounds__(kThreads) update_range(Range<Rule> range, Rule rule, int64_t head) {
  const float scale = range.grad_scale == nullptr ? range.scale : range.scale * *range.grad_scale;
  const int64_t packs = (range.count - head) / kLanes;
  const int64_t singles = range.count - packs * kLanes;
  for (int64_t i = thread_index(); i < packs; i += thread_count()) {
    update<kLanes, Copy>(range, rule, scale, head + i * kLanes);
  }
  for (int64_t i = thread_index(); i < singles; i += thread_count()) {
    update<1, Copy>(range, rule, scale, i < head ? i : i + packs * kLanes);
  }
}

/// Elements from `pointer` to the next boundary of kLanes elements.
int64_t to_boundary(const void* pointer, size_t element_size) {
  const auto index = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) / element_size);
  return (kLanes - index % kLanes) % kLanes;
}

/// Elements before the first at which all arrays are on a boundary; all of them when there is no such
/// element.
template <typename Copy, typename Rule>
int64_t head_of(const Range<Rule>& range) {
  const int64_t head = to_boundary(range.param, sizeof(float));
  bool together = to_boundary(range.grad, sizeof(float)) == head;
  for (const float* state : range.state) together &= to_boundary(state, sizeof(float)) == head;
  if (range.copy != nullptr) together &= to_boundary(range.copy, sizeof(Copy)) == head;
  return together ? std::min(head, range.count) : range.count;
}

template <typename Rule>
int launch_update(const Range<Rule>& range, const Rule& rule, Dtype copy_dtype, void* stream) {
  constexpr int64_t kMaxBlocks = 132 * 32;
  if (range.count == 0) return cudaSuccess;
  return dispatch(copy_dtype, [&](auto scalar) -> int {
    using Copy = decltype(scalar);
    const int64_t head = head_of<Copy>(range);
    const int64_t packs = (range.count - head) / kLanes;
    const int64_t items = std::max(packs, range.count - packs * kLanes);
    const auto blocks = static_cast<unsigned>(std::min((items + kThreads - 1) / kThreads, kMaxBlocks));
    update_range<Copy><<<blocks, kThreads, 0, as_stream(stream)>>>(range, rule, head);
    return cudaGetLastError();
  });
}

// Sum of squares.

constexpr int kSquaresInFlight = 4;
constexpr int64_t kMaxSquaresBlocks = 132 * 4;  // one wave
static_assert(kMaxSquaresBlocks <= kSquaresScratch);

/// Four values from values[at] on, zero after the end. Whether they are read as a pack changes no sum.
template <bool kPacked>
__device__ Pack<float, kLanes> read_four(const float* __restrict__ values, int64_t at, int64_t count) {
  Pack<float, kLanes> four = {};
  if (kPacked && at + kLanes <= count) {
    four.load(values + at);
  } else {
    for (int j = 0; j < kLanes; ++j) {
      if (at + j < count) four.lanes[j] = values[at + j];
    }
  }
  return four;
}

template <bool kPacked>
__global__ void __launch_bounds__(kThreads)
    square_partials(double* __restrict__ partial, const float* __restrict__ values, int64_t count) {
  __shared__ double shared[kThreads / 32];
  double sums[kLanes] = {};
  const int64_t step = thread_count() * kLanes;
  for (int64_t at = thread_index() * kLanes; at < count; at += kSquaresInFlight * step) {
    Pack<float, kLanes> fours[kSquaresInFlight];
#pragma unroll
    for (int u = 0; u < kSquaresInFlight; ++u) {
      fours[u] = read_four<kPacked>(values, at + u * step, count);
    }
#pragma unroll
    for (int u = 0; u < kSquaresInFlight; ++u) {
      for (int j = 0; j < kLanes; ++j) {
        const double value = fours[u][j];
        sums[j] += value * value;
      }
    }
  }
  const double sum = block_sum<kThreads>((sums[0] + sums[1]) + (sums[2] + sums[3]), shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) add_partials(double* out, const double* partial, int count) {
  __shared__ double shared[kThreads / 32];
  double sum = 0.0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sum = block_sum<kThreads>(sum, shared);
  if (threadIdx.x == 0) *out = sum;
}

}  // namespace

int adamw(float* param, float* exp_avg, float* exp_avg_sq, const float* grad, void* copy, Dtype copy_dtype,
          int64_t count, const AdamWStep& step, const float* grad_scale, void* stream) {
  const Range<AdamW> range{param, {exp_avg, exp_avg_sq}, grad, copy, count, step.grad_scale, grad_scale};
  return launch_update(range, AdamW(step), copy_dtype, stream);
}

int sgd(float* param, float* momentum_buffer, const float* grad, void* copy, Dtype copy_dtype, int64_t count,
        const SgdStep& step, const float* grad_scale, void* stream) {
  const Range<Sgd> range{param, {momentum_buffer}, grad, copy, count, step.grad_scale, grad_scale};
  return launch_update(range, Sgd(step), copy_dtype, stream);
}

int sum_of_squares(double* out, double* scratch, const float* values, int64_t count, void* stream) {
  constexpr int64_t kPerBlock = kThreads * kLanes * kSquaresInFlight;
  const auto blocks = static_cast<unsigned>(std::min((count + kPerBlock - 1) / kPerBlock, kMaxSquaresBlocks));
  if (blocks > 0) {
    const auto kernel = packs({values}, 0) ? square_partials<true> : square_partials<false>;
    kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(scratch, values, count);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
  }
  add_partials<<<1, kThreads, 0, as_stream(stream)>>>(out, scratch, static_cast<int>(blocks));
  return cudaGetLastError();
}

}  // namespace trireme::kernels::cuda
