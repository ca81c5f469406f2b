#include <algorithm>
#include <cstdint>
#include <limits>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;

/// Heads (batch, heads, seq_len, head_dim) with these strides.
template <typename Scalar>
struct Heads {
  const Scalar* data;
  int64_t heads, batch_stride, head_stride, row_stride;
};

/// Rows (batch * seq_len) of packed heads made from heads elsewhere. The halves of a head are `half` elements
/// long and the second starts at `high`. Query and key are turned unless cosine is nullptr.
template <typename Scalar>
struct Rotation {
  Scalar* out;
  int64_t out_stride;
  Heads<Scalar> query, key, value;
  const float* cosine;
  const float* sine;
  float direction;
  int64_t rows, seq_len, head_dim;
  int64_t half = 0, high = 0;

  __host__ __device__ bool turns() const { return cosine != nullptr; }
  __host__ __device__ int64_t turned_heads() const { return turns() ? query.heads + key.heads : 0; }
  __host__ __device__ int64_t heads() const { return query.heads + key.heads + value.heads; }
};

/// Where the heads of one row come from.
template <typename Scalar>
class Sources {
 public:
  __device__ Sources(const Rotation<Scalar>& task, int64_t batch, int64_t position)
      : query_(task.query, batch, position),
        key_(task.key, batch, position),
        value_(task.value, batch, position) {}

  /// Written as selections, without branches between the loads of several heads.
  __device__ const Scalar* operator[](unsigned head) const {
    const Scalar* from = query_.data;
    int64_t stride = query_.stride;
    unsigned at = head;
    if (head >= query_.heads) from = key_.data, stride = key_.stride, at = head - query_.heads;
    if (head >= query_.heads + key_.heads) {
      from = value_.data, stride = value_.stride, at = head - query_.heads - key_.heads;
    }
    return from + at * stride;
  }

 private:
  struct Row {
    const Scalar* data;
    unsigned heads;
    int64_t stride;

    __device__ Row(const Heads<Scalar>& from, int64_t batch, int64_t position)
        : data(from.data + batch * from.batch_stride + position * from.row_stride),
          heads(static_cast<unsigned>(from.heads)),
          stride(from.head_stride) {}
  };
  Row query_, key_, value_;
};

/// Cosines and sines of consecutive angles.
template <int kLanes>
struct Angles {
  float cosine[kLanes], sine[kLanes];

  __device__ void load(const float* cosines, const float* sines, float direction) {
    constexpr int kStep = kLanes < 4 ? kLanes : 4;
#pragma unroll
    for (int i = 0; i < kLanes; i += kStep) {
      Pack<float, kStep> c, s;
      c.load(cosines + i);
      s.load(sines + i);
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        cosine[i + j] = c[j];
        sine[i + j] = direction * s[j];
      }
    }
  }

  /// The negated angles, which rotate back.
  __device__ Angles back() const {
    Angles angles = *this;
#pragma unroll
    for (float& s : angles.sine) s = -s;
    return angles;
  }

  /// The high half of a head, or with the angles back() the low one. An explicit fmaf, so that every
  /// instantiation contracts the same way.
  template <typename Scalar>
  __device__ Pack<Scalar, kLanes> turned(const Pack<Scalar, kLanes>& own,
                                         const Pack<Scalar, kLanes>& other) const {
    Pack<Scalar, kLanes> out;
#pragma unroll
    for (int i = 0; i < kLanes; ++i) out.set(i, fmaf(own[i], cosine[i], other[i] * sine[i]));
    return out;
  }
};

// Heads of 2^n packs of 16 bytes, at most a warp of them. Lanes hold consecutive packs of a row, so that an
// access of a warp is one piece of memory, and exchange the halves of a head.

constexpr int kPacksOfLane = 4;

/// The value of the lane whose index is this one's xor `bits` (a warp shuffle). Every lane calls it.
template <typename Scalar, int kLanes>
__device__ Pack<Scalar, kLanes> exchanged(const RawPack<Scalar, kLanes>& own, unsigned bits) {
  int4 word;
  static_assert(sizeof(word) == sizeof(own));
  memcpy(&word, &own, sizeof(word));
  word.x = __shfl_xor_sync(0xffffffffu, word.x, bits);
  word.y = __shfl_xor_sync(0xffffffffu, word.y, bits);
  word.z = __shfl_xor_sync(0xffffffffu, word.z, bits);
  word.w = __shfl_xor_sync(0xffffffffu, word.w, bits);
  Pack<Scalar, kLanes> other;
  memcpy(&other, &word, sizeof(word));
  return other;
}

/// `lanes` threads, whole heads of them, take a tile of a row; blockIdx.y is the tile. The i-th pack of a
/// lane is i * lanes packs after its first one.
template <bool kTurns, typename Scalar>
__global__ void __launch_bounds__(kThreads, 4)
    rotate_lanes(Rotation<Scalar> task, unsigned lanes, unsigned rows_of_block) {
  constexpr int kLanes = kFullPack<Scalar>;
  const auto packs_of_head = static_cast<unsigned>(task.head_dim) / kLanes;
  const auto heads = static_cast<unsigned>(task.heads()), turned = static_cast<unsigned>(task.turned_heads());
  const int shift = __ffs(static_cast<int>(packs_of_head)) - 1;  // in place of a division by it
  const unsigned row_of_block = threadIdx.x / lanes, lane = threadIdx.x - row_of_block * lanes;
  const unsigned row = blockIdx.x * rows_of_block + row_of_block;
  const bool live = row_of_block < rows_of_block && row < task.rows;  // all take part in the exchange
  const unsigned batch = row / static_cast<unsigned>(task.seq_len);
  const unsigned position = row - batch * static_cast<unsigned>(task.seq_len);

  const unsigned heads_apart = lanes >> shift, in_head = lane & (packs_of_head - 1);
  const unsigned first_head = blockIdx.y * (kPacksOfLane * heads_apart) + (lane >> shift);
  const Sources<Scalar> sources(task, batch, position);
  RawPack<Scalar, kLanes> packs[kPacksOfLane];
#pragma unroll
  for (int i = 0; i < kPacksOfLane; ++i) {
    const unsigned head = first_head + i * heads_apart;
    const Scalar* from = sources[head] + in_head * kLanes;
    if (live && head < heads) packs[i].load(from);
  }
  if constexpr (kTurns) {
    const unsigned packs_of_half = packs_of_head / 2;
    const int64_t entry = position * task.half + (in_head & (packs_of_half - 1)) * kLanes;
    Angles<kLanes> angles;
    angles.load(task.cosine + entry, task.sine + entry,
                in_head < packs_of_half ? -task.direction : task.direction);
#pragma unroll
    for (int i = 0; i < kPacksOfLane; ++i) {
      const Pack<Scalar, kLanes> other = exchanged(packs[i], packs_of_half);
      if (first_head + i * heads_apart < turned) {
        packs[i].assign(angles.turned(packs[i].pack(), other));
      }
    }
  }
  if (!live) return;
  Scalar* to = task.out + row * task.out_stride + in_head * kLanes;
#pragma unroll
  for (int i = 0; i < kPacksOfLane; ++i) {
    const unsigned head = first_head + i * heads_apart;
    if (head < heads) packs[i].pack().store(to + head * task.head_dim);
  }
}

template <typename Scalar>
bool fits_lanes(const Rotation<Scalar>& task) {
  const int64_t packs_of_head = task.head_dim / kFullPack<Scalar>;
  return packs_of_head <= 32 && (packs_of_head & (packs_of_head - 1)) == 0 &&
         task.rows <= std::numeric_limits<int>::max();
}

template <typename Scalar>
int launch_lanes(const Rotation<Scalar>& task, void* stream) {
  const int64_t packs_of_head = task.head_dim / kFullPack<Scalar>;
  const int64_t heads_apart =
      std::min((task.heads() + kPacksOfLane - 1) / kPacksOfLane, kThreads / packs_of_head);
  const int64_t tile = heads_apart * kPacksOfLane, lanes = heads_apart * packs_of_head;
  const int64_t rows_of_block = kThreads / lanes;
  const auto threads = static_cast<unsigned>((rows_of_block * lanes + 31) / 32 * 32);  // whole warps
  const dim3 blocks(static_cast<unsigned>((task.rows + rows_of_block - 1) / rows_of_block),
                    static_cast<unsigned>((task.heads() + tile - 1) / tile));
  const auto kernel = task.turns() ? rotate_lanes<true, Scalar> : rotate_lanes<false, Scalar>;
  kernel<<<blocks, threads, 0, as_stream(stream)>>>(task, static_cast<unsigned>(lanes),
                                                    static_cast<unsigned>(rows_of_block));
  return cudaGetLastError();
}

// All other heads.

constexpr int kHeadsOfGroup = 4;  // turned by the same angles by one thread

/// Groups of heads; head i of group g is g + i * head_groups(task).
template <typename Scalar>
__host__ __device__ int64_t head_groups(const Rotation<Scalar>& task) {
  return (task.heads() + kHeadsOfGroup - 1) / kHeadsOfGroup;
}

/// kLanes elements of both halves of the heads of a group. All loads come before the first store, so that
/// they are in flight together.
template <typename Scalar, int kLanes>
__device__ void rotate_packs(const Rotation<Scalar>& task, int64_t row, int64_t group, int64_t element) {
  const int64_t batch = row / task.seq_len;
  const int64_t position = row - batch * task.seq_len;
  const Sources<Scalar> sources(task, batch, position);
  RawPack<Scalar, kLanes> low[kHeadsOfGroup], high[kHeadsOfGroup];
#pragma unroll
  for (int i = 0; i < kHeadsOfGroup; ++i) {
    const int64_t head = group + i * head_groups(task);
    if (head >= task.heads()) continue;
    low[i].load(sources[head] + element);
    high[i].load(sources[head] + element + task.high);
  }
  Angles<kLanes> angles;
  if (task.turns()) {
    const int64_t entry = position * task.half + element;
    angles.load(task.cosine + entry, task.sine + entry, task.direction);
  }
#pragma unroll
  for (int i = 0; i < kHeadsOfGroup; ++i) {
    const int64_t head = group + i * head_groups(task);
    if (head >= task.heads()) continue;
    if (head < task.turned_heads()) {
      const Pack<Scalar, kLanes> a = low[i].pack(), b = high[i].pack();
      low[i].assign(angles.back().turned(a, b));
      high[i].assign(angles.turned(b, a));
    }
    Scalar* to = task.out + row * task.out_stride + head * task.head_dim + element;
    low[i].pack().store(to);
    high[i].pack().store(to + task.high);
  }
}

/// A row is blockDim.x threads wide; a block has blockDim.y rows.
template <typename Scalar, int kLanes>
__global__ void __launch_bounds__(kThreads) rotate_rows(Rotation<Scalar> task) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= task.rows) return;
  const auto packs_of_half = static_cast<unsigned>(task.half / kLanes);
  const auto items = static_cast<unsigned>(head_groups(task)) * packs_of_half;
  for (unsigned item = threadIdx.x; item < items; item += blockDim.x) {
    rotate_packs<Scalar, kLanes>(task, row, item / packs_of_half, item % packs_of_half * kLanes);
  }
}

template <int kLanes, typename Scalar>
int launch_rows(const Rotation<Scalar>& task, void* stream) {
  const int64_t items = head_groups(task) * (task.half / kLanes);
  const auto threads = static_cast<unsigned>(std::min<int64_t>(items, kThreads));
  const unsigned rows_of_block = kThreads / threads;
  const auto blocks = static_cast<unsigned>((task.rows + rows_of_block - 1) / rows_of_block);
  rotate_rows<Scalar, kLanes><<<blocks, dim3(threads, rows_of_block), 0, as_stream(stream)>>>(task);
  return cudaGetLastError();
}

/// Whether every pack of every head starts at a multiple of 16 bytes.
template <typename Scalar>
bool packed(const Rotation<Scalar>& task) {
  int64_t strides = task.out_stride | task.half | task.high;
  const Heads<Scalar> sources[] = {task.query, task.key, task.value};
  for (const Heads<Scalar>& from : sources) {
    strides |= from.batch_stride | from.head_stride | from.row_stride;
  }
  return packs({task.out, task.query.data, task.key.data, task.value.data, task.cosine, task.sine},
               strides * static_cast<int64_t>(sizeof(Scalar)));
}

template <typename Scalar>
int rotate(Rotation<Scalar> task, void* stream) {
  if (task.turns() && task.head_dim % 2 != 0) return cudaErrorInvalidValue;
  if (task.rows == 0 || task.heads() == 0 || task.head_dim == 0) return cudaSuccess;
  // A head of odd size, which is only ever copied, has its middle element in both halves.
  task.half = (task.head_dim + 1) / 2;
  task.high = task.head_dim - task.half;
  if (!packed(task)) return launch_rows<1>(task, stream);
  return fits_lanes(task) ? launch_lanes(task, stream) : launch_rows<kFullPack<Scalar>>(task, stream);
}

template <typename Scalar>
Heads<Scalar> typed(const HeadGradient& gradient) {
  return {static_cast<const Scalar*>(gradient.data), gradient.heads, gradient.batch_stride,
          gradient.head_stride, gradient.row_stride};
}

}  // namespace

int rope_inplace(void* x, const float* cosine, const float* sine, int64_t rows, int64_t seq_len,
                 int64_t stride, int64_t heads, int64_t head_dim, float direction, Dtype dtype,
                 void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    auto* out = static_cast<Scalar*>(x);
    return rotate(Rotation<Scalar>{.out = out,
                                   .out_stride = stride,
                                   .query = {out, heads, seq_len * stride, head_dim, stride},
                                   .key = {},
                                   .value = {},
                                   .cosine = cosine,
                                   .sine = sine,
                                   .direction = direction,
                                   .rows = rows,
                                   .seq_len = seq_len,
                                   .head_dim = head_dim},
                  stream);
  });
}

int pack_head_gradients(void* d_qkv, const HeadGradient& query, const HeadGradient& key,
                        const HeadGradient& value, const float* cosine, const float* sine, int64_t batch,
                        int64_t seq_len, int64_t head_dim, Dtype dtype, void* stream) {
  return dispatch(dtype, [&](auto scalar) {
    using Scalar = decltype(scalar);
    return rotate(Rotation<Scalar>{.out = static_cast<Scalar*>(d_qkv),
                                   .out_stride = (query.heads + key.heads + value.heads) * head_dim,
                                   .query = typed<Scalar>(query),
                                   .key = typed<Scalar>(key),
                                   .value = typed<Scalar>(value),
                                   .cosine = cosine,
                                   .sine = sine,
                                   .direction = -1.0f,
                                   .rows = batch * seq_len,
                                   .seq_len = seq_len,
                                   .head_dim = head_dim},
                  stream);
  });
}

}  // namespace trireme::kernels::cuda
