#pragma once
// Helpers of the norms' forward and backward kernels: how a row is spread over threads, and sums over it.
// Device code only; included by .cu files.
#include "trireme/kernels/vector.cuh"

namespace trireme::kernels::cuda {

/// kThreads threads hold up to kPacks packs of kLanes elements each; kPacks = 0: rows of any width, read from
/// memory again for every pass. With kParts > 1 all packs are held, and each thread stands in for kParts
/// threads: it takes their sums, and its p-th pack is one of thread p % kParts.
template <int kThreads_, int kPacks_, int kLanes_, int kParts_ = 1>
struct Shape {
  static constexpr int kThreads = kThreads_, kPacks = kPacks_, kLanes = kLanes_, kParts = kParts_;
  static constexpr bool kHeld = kPacks > 0, kAllHeld = kParts > 1;
  static constexpr int kRows = kThreads == 32 ? 4 : 1;  ///< rows that a block works on at a time
  static constexpr int kBlockThreads = kThreads * kRows;
};

constexpr int kPacksHeld = 2;  ///< 16 bytes of each operand twice leave room to prefetch the next row
constexpr int kMaxThreads = 512;

constexpr int threads_for(int64_t packs) {
  int threads = 32;
  while (threads < kMaxThreads && threads * kPacksHeld < packs) threads *= 2;
  return threads;
}

/// Calls body with the Shape for rows of `width` elements.
template <typename Scalar, typename Body>
int with_shape(bool packed, int64_t width, const Body& body) {
  constexpr int kLanes = kFullPack<Scalar>;
  if (!packed) return body(Shape<kMaxThreads, 0, 1>{});
  const int64_t packs = width / kLanes;
  switch (threads_for(packs)) {
    case 32:
      return body(Shape<32, kPacksHeld, kLanes>{});
    case 64:
      return body(Shape<64, kPacksHeld, kLanes>{});
    case 128:
      return body(Shape<128, kPacksHeld, kLanes>{});
    case 256:
      return body(Shape<256, kPacksHeld, kLanes>{});
    default:
      return packs <= kMaxThreads * kPacksHeld ? body(Shape<kMaxThreads, kPacksHeld, kLanes>{})
                                               : body(Shape<kMaxThreads, 0, kLanes>{});
  }
}

/// body(p, column) for every pack of this thread: the p-th one, which starts at `column`.
template <typename Shape, typename Body>
__device__ void for_packs(int width, const Body& body) {
  const int first = static_cast<int>(threadIdx.x) * Shape::kLanes;
  constexpr int kStep = Shape::kThreads * Shape::kLanes;
  if constexpr (Shape::kHeld) {
#pragma unroll
    for (int p = 0; p < Shape::kPacks; ++p) {
      if (Shape::kAllHeld || first + p * kStep < width) body(p, first + p * kStep);
    }
  } else {
    for (int column = first; column < width; column += kStep) body(0, column);
  }
}

/// The partial sums of kParts threads.
template <int kParts>
struct PartSums {
  float parts[kParts] = {};
};

/// This thread's elements of a row: in registers, or read from memory if the Shape holds none.
template <typename Scalar, typename Shape>
class Slice {
 public:
  using RowPack = Pack<Scalar, Shape::kLanes>;

  __device__ void load(const Scalar* row, int width) {
    row_ = row;
    if constexpr (Shape::kHeld) {
      for_packs<Shape>(width, [&](int p, int column) { held_[p].load(row + column); });
    }
  }

  /// For rows that nobody reads again soon.
  __device__ void load_streaming(const Scalar* row, int width) {
    row_ = row;
    if constexpr (Shape::kHeld) {
      for_packs<Shape>(width, [&](int p, int column) { held_[p].load_streaming(row + column); });
    }
  }

  __device__ RowPack pack(int p, int column) const {
    if constexpr (Shape::kHeld) {
      return held_[p].pack();
    } else {
      RowPack read;
      read.load(row_ + column);
      return read;
    }
  }

  /// The slice becomes slice + other, rounded to Scalar, and is stored in `to`.
  __device__ void add(const Scalar* other, Scalar* to, int width) {
    Slice addend;
    addend.load_streaming(other, width);
    for_packs<Shape>(width, [&](int p, int column) {
      RowPack total = pack(p, column);
      const RowPack delta = addend.pack(p, column);
      for (int j = 0; j < Shape::kLanes; ++j) total.set(j, total[j] + delta[j]);
      total.store(to + column);
      if constexpr (Shape::kHeld) held_[p].assign(total);
    });
    row_ = to;
  }

  /// The sums of term(element).
  template <typename Term>
  __device__ PartSums<Shape::kParts> sum(int width, const Term& term) const {
    PartSums<Shape::kParts> sums;
    for_packs<Shape>(width, [&](int p, int column) {
      const RowPack values = pack(p, column);
      for (int j = 0; j < Shape::kLanes; ++j) sums.parts[p % Shape::kParts] += term(values[j]);
    });
    return sums;
  }

 private:
  const Scalar* row_;
  RawPack<Scalar, Shape::kLanes> held_[Shape::kHeld ? Shape::kPacks : 1];
};

/// Sums over the threads of a row, one after another. Two buffers take turns: who writes one of them has
/// passed the barrier of the other, which all threads reach only after they have read the first.
template <int kThreads>
class RowSum {
 public:
  using Buffers = float[2][kThreads / 32];

  __device__ explicit RowSum(Buffers& buffers) : buffers_(buffers) {}

  __device__ float operator()(float value) {
    turn_ ^= 1;
    return block_sum<kThreads>(value, buffers_[turn_]);
  }

  template <int kParts>
  __device__ float operator()(const PartSums<kParts>& sums) {
    static_assert(kThreads == 32 || kParts == 1);
    float total = (*this)(sums.parts[0]);
    for (int part = 1; part < kParts; ++part) total += (*this)(sums.parts[part]);
    return total;
  }

 private:
  Buffers& buffers_;
  int turn_ = 0;
};

}  // namespace trireme::kernels::cuda
