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
  static constexpr MomentKind kind(int state) { return adamw_moment(state); }
  float keep, step_size, inverse_root, blend1, beta2, blend2, eps;

  AdamW() = default;
  AdamW(const AdamWStep& step, const UpdatePart& part)
      : keep(1.0f - part.lr * part.weight_decay),
        step_size(part.lr / step.bias_correction1),
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
  static constexpr MomentKind kind(int state) { return sgd_moment(state); }
  float lr, momentum, weight_decay;
  bool first, nesterov;

  Sgd() = default;
  Sgd(const SgdStep& step, const UpdatePart& part)
      : lr(part.lr),
        momentum(step.momentum),
        weight_decay(part.weight_decay),
        first(step.first),
        nesterov(step.nesterov) {}

  __device__ float operator()(float param, float grad, float (&state)[kStates]) const {
    const float g = fmaf(weight_decay, param, grad);
    state[0] = first ? g : fmaf(momentum, state[0], g);  // at first the buffer may hold anything
    return fmaf(-lr, nesterov ? fmaf(momentum, state[0], g) : state[0], param);
  }
};

// One pass over the parts of a range.

template <typename Rule>
struct Range {
  float* param;
  Moments moments;
  const void* grad;
  void* copy;  ///< or nullptr
  float scale;
  const float* grad_scale;  ///< or nullptr

  __host__ __device__ float* state(int number) const { return static_cast<float*>(moments.values[number]); }
  __device__ float factor() const { return grad_scale == nullptr ? scale : scale * *grad_scale; }
};

/// kWidth elements from `at` on. All loads are issued before the first is used.
template <int kWidth, typename Grad, typename Copy, typename Rule>
__device__ void update_at(const Range<Rule>& range, const Rule& rule, int64_t at) {
  RawPack<float, kWidth> raw_params, raw_states[Rule::kStates];
  RawPack<Grad, kWidth> raw_grads;
  raw_params.load(range.param + at);
  raw_grads.load(static_cast<const Grad*>(range.grad) + at);
  for (int s = 0; s < Rule::kStates; ++s) raw_states[s].load(range.state(s) + at);
  const float scale = range.factor();

  Pack<float, kWidth> params = raw_params.pack(), states[Rule::kStates];
  const Pack<Grad, kWidth> grads = raw_grads.pack();
  for (int s = 0; s < Rule::kStates; ++s) states[s] = raw_states[s].pack();
  Pack<Copy, kWidth> copy;
  for (int j = 0; j < kWidth; ++j) {
    float values[Rule::kStates];
    for (int s = 0; s < Rule::kStates; ++s) values[s] = states[s][j];
    const float next = rule(params[j], __fmul_rn(grads[j], scale), values);
    for (int s = 0; s < Rule::kStates; ++s) states[s].set(j, values[s]);
    params.set(j, next);
    copy.set(j, next);
  }
  params.store(range.param + at);
  for (int s = 0; s < Rule::kStates; ++s) states[s].store(range.state(s) + at);
  if (range.copy != nullptr) copy.store(static_cast<Copy*>(range.copy) + at);
}

/// The parts that one launch updates: each has blocks of threads, one part behind another.
template <typename Rule>
struct Parts {
  static constexpr int kMost = 32;
  struct One {
    int64_t begin, count;
    int64_t head;          ///< elements before the first that can be accessed as a pack
    unsigned first_block;  ///< of its own
    Rule rule;
  };
  One all[kMost];
  int count = 0;
  unsigned blocks = 0;
};

/// A pack for every thread behind the part's head, and one by one what lies before and after the packs.
template <typename Grad, typename Copy, typename Rule>
__global__ void __launch_bounds__(kThreads)
    update_parts(Range<Rule> range, const __grid_constant__ Parts<Rule> parts) {
  int index = 0;
  while (index + 1 < parts.count && blockIdx.x >= parts.all[index + 1].first_block) ++index;
  const auto& part = parts.all[index];
  const int64_t i = static_cast<int64_t>(blockIdx.x - part.first_block) * kThreads + threadIdx.x;
  const int64_t packs = (part.count - part.head) / kLanes;
  if (i < packs) update_at<kLanes, Grad, Copy>(range, part.rule, part.begin + part.head + i * kLanes);
  if (i < part.count - packs * kLanes) {
    update_at<1, Grad, Copy>(range, part.rule, part.begin + (i < part.head ? i : i + packs * kLanes));
  }
}

/// Elements from `pointer` to the next boundary of kLanes elements.
int64_t to_boundary(const void* pointer, size_t element_size, int64_t begin) {
  const auto index = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer) / element_size) + begin;
  return (kLanes - index % kLanes) % kLanes;
}

/// Elements of a part before the first at which all arrays are on a boundary; all of them when there is no
/// such element.
template <typename Grad, typename Copy, typename Rule>
int64_t head_of(const Range<Rule>& range, int64_t begin, int64_t count) {
  const int64_t head = to_boundary(range.param, sizeof(float), begin);
  bool together = to_boundary(range.grad, sizeof(Grad), begin) == head;
  for (int s = 0; s < Rule::kStates; ++s)
    together &= to_boundary(range.state(s), sizeof(float), begin) == head;
  if (range.copy != nullptr) together &= to_boundary(range.copy, sizeof(Copy), begin) == head;
  return together ? std::min(head, count) : count;
}

template <typename Grad, typename Copy, typename Rule, typename Step>
int launch_update(const Range<Rule>& range, std::span<const UpdatePart> parts, const Step& step,
                  cudaStream_t stream) {
  while (!parts.empty()) {
    Parts<Rule> some;
    const size_t taken = std::min(parts.size(), static_cast<size_t>(Parts<Rule>::kMost));
    for (const UpdatePart& part : parts.first(taken)) {
      const int64_t count = part.end - part.begin;
      if (count == 0) continue;
      const int64_t head = head_of<Grad, Copy>(range, part.begin, count);
      const int64_t packs = (count - head) / kLanes;
      const int64_t items = std::max(packs, count - packs * kLanes);
      some.all[some.count++] = {part.begin, count, head, some.blocks, Rule(step, part)};
      some.blocks += static_cast<unsigned>((items + kThreads - 1) / kThreads);
    }
    parts = parts.subspan(taken);
    if (some.blocks > 0) update_parts<Grad, Copy><<<some.blocks, kThreads, 0, stream>>>(range, some);
  }
  return cudaGetLastError();
}

// The update where moments are in fewer bits: a thread has a block of them.

constexpr int kBlock = static_cast<int>(kMomentBlock);

/// kBlock elements, as packs where kWhole; else `count` of them, and zeros.
template <bool kWhole, typename Scalar>
__device__ void load_block(float (&out)[kBlock], const Scalar* from, int count) {
  constexpr int kWidth = kFullPack<Scalar> < kBlock ? kFullPack<Scalar> : kBlock;
  if constexpr (kWhole) {
    RawPack<Scalar, kWidth> raw[kBlock / kWidth];
    for (int p = 0; p < kBlock / kWidth; ++p) raw[p].load(from + p * kWidth);
    for (int i = 0; i < kBlock; ++i) out[i] = raw[i / kWidth].pack()[i % kWidth];
  } else {
    for (int i = 0; i < kBlock; ++i) out[i] = i < count ? to_float(from[i]) : 0.0f;
  }
}

template <bool kWhole, typename Scalar>
__device__ void store_block(Scalar* to, const float (&values)[kBlock], int count) {
  constexpr int kWidth = kFullPack<Scalar> < kBlock ? kFullPack<Scalar> : kBlock;
  if constexpr (kWhole) {
    for (int p = 0; p < kBlock / kWidth; ++p) {
      Pack<Scalar, kWidth> pack;
      for (int i = 0; i < kWidth; ++i) pack.set(i, values[p * kWidth + i]);
      pack.store(to + p * kWidth);
    }
  } else {
    for (int i = 0; i < kBlock; ++i) {
      if (i < count) to[i] = from_float<Scalar>(values[i]);
    }
  }
}

/// Loads a block as integers of its size, or one by one.
template <bool kWhole, typename Integer>
__device__ void load_bits(Integer (&out)[kBlock], const Integer* from, int count) {
  if constexpr (kWhole) {
    using Word = std::conditional_t<sizeof(out) == 16, int4, int2>;
    const Word word = *reinterpret_cast<const Word*>(from);
    memcpy(out, &word, sizeof(word));
  } else {
    for (int i = 0; i < kBlock; ++i) out[i] = i < count ? from[i] : Integer(0);
  }
}

template <bool kWhole, typename Integer>
__device__ void store_bits(Integer* to, const Integer (&values)[kBlock], int count) {
  if constexpr (kWhole) {
    using Word = std::conditional_t<sizeof(values) == 16, int4, int2>;
    Word word;
    memcpy(&word, values, sizeof(word));
    *reinterpret_cast<Word*>(to) = word;
  } else {
    for (int i = 0; i < kBlock; ++i) {
      if (i < count) to[i] = values[i];
    }
  }
}

template <MomentFormat kFormat, bool kWhole>
__device__ void read_moments(float (&out)[kBlock], const Moments& moments, int number, MomentKind kind,
                             int64_t block, int count) {
  if constexpr (kFormat == MomentFormat::kBf16) {
    uint16_t bits[kBlock];
    load_bits<kWhole>(bits, static_cast<const uint16_t*>(moments.values[number]) + block * kBlock, count);
    for (int i = 0; i < kBlock; ++i) out[i] = from_moment_bf16(bits[i]);
  } else {
    int8_t values[kBlock];
    load_bits<kWhole>(values, static_cast<const int8_t*>(moments.values[number]) + block * kBlock, count);
    const uint8_t exponent = moments.exponents[number][block];
    for (int i = 0; i < kBlock; ++i) {
      const float root = from_moment_int8(values[i], exponent);
      out[i] = kind == MomentKind::kSquares ? __fmul_rn(root, root) : root;
    }
  }
}

/// Numbers beyond `count` are zeros.
template <MomentFormat kFormat, bool kWhole>
__device__ void write_moments(const float (&x)[kBlock], const Moments& moments, int number, MomentKind kind,
                              int64_t block, int count) {
  const MomentBits random(moments.key, moments.first_block + block, number);
  if constexpr (kFormat == MomentFormat::kBf16) {
    uint16_t bits[kBlock];
    for (int i = 0; i < kBlock; ++i) bits[i] = to_moment_bf16(x[i], random.of(i));
    store_bits<kWhole>(static_cast<uint16_t*>(moments.values[number]) + block * kBlock, bits, count);
  } else {
    float roots[kBlock];
    for (int i = 0; i < kBlock; ++i) roots[i] = kind == MomentKind::kSquares ? __fsqrt_rn(x[i]) : x[i];
    int8_t values[kBlock];
    moments.exponents[number][block] = to_moment_int8(roots, values, kind, random);
    store_bits<kWhole>(static_cast<int8_t*>(moments.values[number]) + block * kBlock, values, count);
  }
}

template <MomentFormat kFormat, bool kWhole, typename Grad, typename Copy, typename Rule>
__device__ void update_block(const Range<Rule>& range, const Rule& rule, int64_t block, int count) {
  const int64_t at = block * kBlock;
  float params[kBlock], grads[kBlock], states[Rule::kStates][kBlock];
  load_block<kWhole>(params, range.param + at, count);
  load_block<kWhole>(grads, static_cast<const Grad*>(range.grad) + at, count);
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s)
    read_moments<kFormat, kWhole>(states[s], range.moments, s, Rule::kind(s), block, count);
  const float scale = range.factor();
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float values[Rule::kStates];
    for (int s = 0; s < Rule::kStates; ++s) values[s] = states[s][i];
    params[i] = rule(params[i], __fmul_rn(grads[i], scale), values);
    for (int s = 0; s < Rule::kStates; ++s) states[s][i] = values[s];
  }
  store_block<kWhole>(range.param + at, params, count);
  if (range.copy != nullptr) store_block<kWhole>(static_cast<Copy*>(range.copy) + at, params, count);
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s)
    write_moments<kFormat, kWhole>(states[s], range.moments, s, Rule::kind(s), block, count);
}

template <MomentFormat kFormat, typename Grad, typename Copy, typename Rule>
__global__ void __launch_bounds__(kThreads)
    update_blocks(Range<Rule> range, int64_t count, Rule rule, bool packed) {
  const int64_t block = thread_index(), left = count - block * kBlock;
  if (left <= 0) return;
  if (packed && left >= kBlock) {
    update_block<kFormat, true, Grad, Copy>(range, rule, block, kBlock);
  } else {
    update_block<kFormat, false, Grad, Copy>(range, rule, block,
                                             static_cast<int>(min(left, int64_t{kBlock})));
  }
}

/// Whether the blocks of all arrays can be accessed as packs.
template <typename Rule>
bool has_packs(const Range<Rule>& range) {
  bool all = packs({range.param, range.grad, range.copy}, 0);
  const size_t bytes = range.moments.format == MomentFormat::kBf16 ? 16 : 8;
  for (int s = 0; s < Rule::kStates; ++s)
    all &= reinterpret_cast<uintptr_t>(range.moments.values[s]) % bytes == 0;
  return all;
}

template <MomentFormat kFormat, typename Grad, typename Copy, typename Rule>
int launch_blocks(const Range<Rule>& range, int64_t count, const Rule& rule, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const int64_t blocks = (count + kBlock - 1) / kBlock;
  update_blocks<kFormat, Grad, Copy>
      <<<static_cast<unsigned>((blocks + kThreads - 1) / kThreads), kThreads, 0, stream>>>(range, count, rule,
                                                                                           has_packs(range));
  return cudaGetLastError();
}

template <typename Grad, typename Copy, typename Rule, typename Step>
int launch_format(const Range<Rule>& range, std::span<const UpdatePart> parts, const Step& step,
                  cudaStream_t stream) {
  if (range.moments.format == MomentFormat::kFp32)
    return launch_update<Grad, Copy>(range, parts, step, stream);
  if (parts.size() != 1 || parts[0].begin != 0) return cudaErrorInvalidValue;
  const Rule rule(step, parts[0]);
  if (range.moments.format == MomentFormat::kBf16)
    return launch_blocks<MomentFormat::kBf16, Grad, Copy>(range, parts[0].end, rule, stream);
  return launch_blocks<MomentFormat::kInt8, Grad, Copy>(range, parts[0].end, rule, stream);
}

template <typename Rule, typename Step>
int launch_for(Dtype grad_dtype, Dtype copy_dtype, const Range<Rule>& range,
               std::span<const UpdatePart> parts, const Step& step, void* stream) {
  return dispatch(copy_dtype, [&](auto scalar) -> int {
    using Copy = decltype(scalar);
    if (grad_dtype == Dtype::kFloat) return launch_format<float, Copy>(range, parts, step, as_stream(stream));
    if (grad_dtype != copy_dtype) return cudaErrorInvalidValue;
    return launch_format<Copy, Copy>(range, parts, step, as_stream(stream));
  });
}

// Sum of squares.

constexpr int kSquaresInFlight = 4;
constexpr int kSquareLanes = 8;                 // of any dtype, so that the order of additions is one
constexpr int64_t kMaxSquaresBlocks = 132 * 4;  // one wave
static_assert(kMaxSquaresBlocks <= kSquaresScratch);

/// Values from values[at] on, zero after the end. Whether they are read as a pack changes no sum.
template <bool kPacked, int kWidth, typename Scalar>
__device__ Pack<Scalar, kWidth> read_pack(const Scalar* __restrict__ values, int64_t at, int64_t count) {
  Pack<Scalar, kWidth> pack = {};
  if (kPacked && at + kWidth <= count) {
    pack.load(values + at);
  } else {
    for (int j = 0; j < kWidth; ++j) {
      if (at + j < count) pack.lanes[j] = values[at + j];
    }
  }
  return pack;
}

template <bool kPacked, typename Scalar>
__global__ void __launch_bounds__(kThreads)
    square_partials(double* __restrict__ partial, const Scalar* __restrict__ values, int64_t count) {
  constexpr int kWidth = kFullPack<Scalar>, kPacks = kSquareLanes / kWidth;
  __shared__ double shared[kThreads / 32];
  double sums[kSquareLanes] = {};
  const int64_t step = thread_count() * kSquareLanes;
  for (int64_t at = thread_index() * kSquareLanes; at < count; at += kSquaresInFlight * step) {
    Pack<Scalar, kWidth> packs[kSquaresInFlight][kPacks];
#pragma unroll
    for (int u = 0; u < kSquaresInFlight; ++u) {
      for (int p = 0; p < kPacks; ++p) {
        packs[u][p] = read_pack<kPacked, kWidth>(values, at + u * step + p * kWidth, count);
      }
    }
#pragma unroll
    for (int u = 0; u < kSquaresInFlight; ++u) {
      for (int j = 0; j < kSquareLanes; ++j) {
        const double value = packs[u][j / kWidth][j % kWidth];
        sums[j] += value * value;
      }
    }
  }
  double own = 0.0;
  for (int j = 0; j < kSquareLanes; ++j) own += sums[j];
  const double sum = block_sum<kThreads>(own, shared);
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

int adamw(float* param, const Moments& moments, const void* grad, Dtype grad_dtype, void* copy,
          Dtype copy_dtype, std::span<const UpdatePart> parts, const AdamWStep& step, const float* grad_scale,
          void* stream) {
  const Range<AdamW> range{param, moments, grad, copy, step.grad_scale, grad_scale};
  return launch_for(grad_dtype, copy_dtype, range, parts, step, stream);
}

int sgd(float* param, const Moments& moments, const void* grad, Dtype grad_dtype, void* copy,
        Dtype copy_dtype, std::span<const UpdatePart> parts, const SgdStep& step, const float* grad_scale,
        void* stream) {
  const Range<Sgd> range{param, moments, grad, copy, step.grad_scale, grad_scale};
  return launch_for(grad_dtype, copy_dtype, range, parts, step, stream);
}

int sum_of_squares(double* out, double* scratch, const void* values, Dtype dtype, int64_t count,
                   void* stream) {
  constexpr int64_t kPerBlock = kThreads * kSquareLanes * kSquaresInFlight;
  const auto blocks = static_cast<unsigned>(std::min((count + kPerBlock - 1) / kPerBlock, kMaxSquaresBlocks));
  if (blocks > 0) {
    const int error = dispatch(dtype, [&](auto scalar) -> int {
      using Scalar = decltype(scalar);
      const auto kernel = packs({values}, 0) ? square_partials<true, Scalar> : square_partials<false, Scalar>;
      kernel<<<blocks, kThreads, 0, as_stream(stream)>>>(scratch, static_cast<const Scalar*>(values), count);
      return cudaGetLastError();
    });
    if (error != cudaSuccess) return error;
  }
  add_partials<<<1, kThreads, 0, as_stream(stream)>>>(out, scratch, static_cast<int>(blocks));
  return cudaGetLastError();
}

}  // namespace trireme::kernels::cuda
