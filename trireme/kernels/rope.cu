#include <algorithm>
#include <cstdint>

#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeads = 4;  // heads that a thread turns by the same angles

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

  __host__ __device__ int64_t turned_heads() const { return cosine == nullptr ? 0 : query.heads + key.heads; }
  __host__ __device__ int64_t heads() const { return query.heads + key.heads + value.heads; }
  /// Groups of kHeads heads; head i of group g is g + i * head_groups().
  __host__ __device__ int64_t head_groups() const { return (heads() + kHeads - 1) / kHeads; }

  __device__ const Scalar* source(int64_t head, int64_t batch, int64_t position) const {
    if (head < query.heads) return at(query, head, batch, position);
    head -= query.heads;
    if (head < key.heads) return at(key, head, batch, position);
    return at(value, head - key.heads, batch, position);
  }

 private:
  static __device__ const Scalar* at(const Heads<Scalar>& from, int64_t head, int64_t batch,
                                     int64_t position) {
    return from.data + batch * from.batch_stride + head * from.head_stride + position * from.row_stride;
  }
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

  template <typename Scalar>
  __device__ void turn(Pack<Scalar, kLanes>& low, Pack<Scalar, kLanes>& high) const {
#pragma unroll
    for (int i = 0; i < kLanes; ++i) {
      const float a = low[i], b = high[i];
      // Explicit, so that every instantiation contracts the same way.
      low.set(i, fmaf(a, cosine[i], -(b * sine[i])));
      high.set(i, fmaf(b, cosine[i], a * sine[i]));
    }
  }
};

/// kLanes elements of both halves of the heads of a group. All loads come before the first store, so that
/// they are in flight together.
template <typename Scalar, int kLanes>
__device__ void rotate_packs(const Rotation<Scalar>& task, int64_t row, int64_t group, int64_t element) {
  const int64_t batch = row / task.seq_len;
  const int64_t position = row - batch * task.seq_len;
  Pack<Scalar, kLanes> low[kHeads], high[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int64_t head = group + i * task.head_groups();
    if (head >= task.heads()) continue;
    const Scalar* from = task.source(head, batch, position) + element;
    low[i].load_streaming(from);
    high[i].load_streaming(from + task.high);
  }
  Angles<kLanes> angles;
  if (task.cosine != nullptr) {
    const int64_t entry = position * task.half + element;
    angles.load(task.cosine + entry, task.sine + entry, task.direction);
  }
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int64_t head = group + i * task.head_groups();
    if (head >= task.heads()) continue;
    if (head < task.turned_heads()) angles.turn(low[i], high[i]);
    Scalar* to = task.out + row * task.out_stride + head * task.head_dim + element;
    low[i].store(to);
    high[i].store(to + task.high);
  }
}

/// A row is blockDim.x threads wide; a block has blockDim.y rows.
template <typename Scalar, int kLanes>
__global__ void __launch_bounds__(kThreads) rotate_rows(Rotation<Scalar> task) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (row >= task.rows) return;
  const auto packs_per_half = static_cast<unsigned>(task.half / kLanes);
  const auto items = static_cast<unsigned>(task.head_groups()) * packs_per_half;
  for (unsigned item = threadIdx.x; item < items; item += blockDim.x) {
    rotate_packs<Scalar, kLanes>(task, row, item / packs_per_half, item % packs_per_half * kLanes);
  }
}

template <int kLanes, typename Scalar>
int launch(const Rotation<Scalar>& task, void* stream) {
  const int64_t items = task.head_groups() * (task.half / kLanes);
  if (task.rows == 0 || items == 0) return cudaSuccess;
  const auto threads = static_cast<unsigned>(std::min<int64_t>(items, kThreads));
  const unsigned rows_per_block = kThreads / threads;
  const auto blocks = static_cast<unsigned>((task.rows + rows_per_block - 1) / rows_per_block);
  rotate_rows<Scalar, kLanes><<<blocks, dim3(threads, rows_per_block), 0, as_stream(stream)>>>(task);
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
  if (task.cosine != nullptr && task.head_dim % 2 != 0) return cudaErrorInvalidValue;
  // A head of odd size, which is only ever copied, has its middle element in both halves.
  task.half = (task.head_dim + 1) / 2;
  task.high = task.head_dim - task.half;
  return packed(task) ? launch<kFullPack<Scalar>>(task, stream) : launch<1>(task, stream);
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
