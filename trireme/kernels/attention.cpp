#include "trireme/kernels/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "trireme/base/round_up.h"
#include "trireme/kernels/scalar_math.h"
#include "trireme/kernels/vectors.h"

namespace trireme::kernels {
namespace {

// A tile of a product is kRows x 2 vectors in registers, beside two vectors of B and an element of A.
#if defined(__AVX512F__)
constexpr int64_t kRows = 8;
#elif defined(__AVX__)
constexpr int64_t kRows = 6;
#else
constexpr int64_t kRows = 4;
#endif

/// Query rows whose probabilities backward has at a time.
constexpr int64_t kBlock = 8 * kRows;

/// Element (row, step) is `data[row * row_stride + step * step_stride]`.
struct Left {
  const float* data;
  int64_t row_stride, step_stride;
};
struct Right {
  const float* data;
  int64_t stride;  ///< floats from one row to the next
};

/// C (kRows, kVectors x kLanes) = A B, or is added to.
template <int kVectors, bool kAdds>
void multiply_tile(float* c, int64_t c_stride, Left a, Right b, int64_t inner) {
  Vector sums[kRows][kVectors] = {};
  add_product(
      sums, [&](int64_t row, int64_t step) { return a.data[row * a.row_stride + step * a.step_stride]; },
      b.data, b.stride, inner);
#pragma GCC unroll 8
  for (int64_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector) {
      float* const out = c + row * c_stride + vector * kLanes;
      store(out, kAdds ? load(out) + sums[row][vector] : sums[row][vector]);
    }
  }
}

/// C (kRows, columns) = A B, or is added to; `columns` is a multiple of kLanes.
template <bool kAdds = false>
void multiply(float* c, int64_t c_stride, Left a, Right b, int64_t columns, int64_t inner) {
  int64_t first = 0;
  for (; first + 2 * kLanes <= columns; first += 2 * kLanes)
    multiply_tile<2, kAdds>(c + first, c_stride, a, {b.data + first, b.stride}, inner);
  if (first < columns) multiply_tile<1, kAdds>(c + first, c_stride, a, {b.data + first, b.stride}, inner);
}

/// One head's query, key or value, as it lies in a packed projection.
struct HeadRows {
  const float* data;
  int64_t stride, count, width;
};

/// (count, padded) = scale * rows, with zeros beside them.
void pack(float* to, const HeadRows& rows, int64_t padded, float scale = 1.0f) {
  for (int64_t row = 0; row < rows.count; ++row, to += padded) {
    const float* const from = rows.data + row * rows.stride;
    for (int64_t i = 0; i < rows.width; ++i) to[i] = scale * from[i];
    std::fill(to + rows.width, to + padded, 0.0f);
  }
}

/// (width, padded): the transpose of rows, with zeros beside it.
void pack_transposed(float* to, const HeadRows& rows, int64_t padded) {
  // Few rows at a time: of many that are a power of two apart, the first-level cache would lose some before
  // their next column.
  constexpr int64_t kAtOnce = 16;
  for (int64_t first = 0; first < rows.count; first += kAtOnce) {
    const int64_t end = std::min(rows.count, first + kAtOnce);
    for (int64_t i = 0; i < rows.width; ++i)
      for (int64_t row = first; row < end; ++row) to[i * padded + row] = rows.data[row * rows.stride + i];
  }
  for (int64_t i = 0; i < rows.width; ++i)
    std::fill(to + i * padded + rows.count, to + (i + 1) * padded, 0.0f);
}

/// (count, width) of `from` (count, padded), times `factor`.
void unpack(float* to, int64_t stride, const float* from, int64_t padded, int64_t count, int64_t width,
            float factor = 1.0f) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < width; ++i) to[row * stride + i] = factor * from[row * padded + i];
}

// Loops over scores take whole vectors: those beyond `count` are set to what adds nothing.
constexpr float kNothing = -std::numeric_limits<float>::infinity();

/// exp(score - largest score) of the first `count` in place, zeros up to `columns`; and what makes
/// probabilities of them.
struct Normaliser {
  float log_sum, factor;  ///< log of the sum of all exp(score), 1 / sum of what is in place
};
Normaliser exponentiate(float* scores, int64_t count, int64_t columns) {
  const int64_t whole = round_up(count, kLanes);
  std::fill(scores + count, scores + whole, kNothing);
  float top = kNothing;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < whole; ++i) top = scores[i] > top ? scores[i] : top;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < whole; ++i) {
    scores[i] = exp_approx(scores[i] - top);
    sum += scores[i];
  }
  std::fill(scores + count, scores + columns, 0.0f);
  return {.log_sum = top + std::log(sum), .factor = 1.0f / sum};
}

/// Scores to probabilities, and their gradient to that of the scores, both in place; zeros from `count` to
/// `columns`.
void differentiate(float* scores, float* grad, float log_sum, int64_t count, int64_t columns) {
  const int64_t whole = round_up(count, kLanes);
  std::fill(scores + count, scores + whole, kNothing);
  float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < whole; ++i) {
    scores[i] = exp_approx(scores[i] - log_sum);
    dot += scores[i] * grad[i];
  }
#pragma omp simd
  for (int64_t i = 0; i < whole; ++i) grad[i] = scores[i] * (grad[i] - dot);
  std::fill(scores + count, scores + columns, 0.0f);
  std::fill(grad + count, grad + columns, 0.0f);
}

/// Where the heads of one (batch, head) pair lie.
struct Head {
  Head(const AttentionSizes& sizes, int64_t batch, int64_t head)
      : query(batch * sizes.length * sizes.row() + head * sizes.head_dim),
        key(batch * sizes.length * sizes.row() +
            (sizes.heads + head / (sizes.heads / sizes.kv_heads)) * sizes.head_dim),
        value(key + sizes.kv_heads * sizes.head_dim),
        out(batch * sizes.length * sizes.heads * sizes.head_dim + head * sizes.head_dim),
        log_sums((batch * sizes.heads + head) * sizes.length) {}
  int64_t query, key, value, out, log_sums;
};

/// Rows and columns of what a thread works on: those of the problem, up to whole tiles.
struct Padded {
  explicit Padded(const AttentionSizes& sizes)
      : length(round_up(round_up(sizes.length, kRows), kLanes)), width(round_up(sizes.head_dim, kLanes)) {}
  int64_t length, width;
};

float scale_of(const AttentionSizes& sizes) {
  return 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
}

class ForwardOfHead {
 public:
  explicit ForwardOfHead(const AttentionSizes& sizes)
      : sizes_(sizes),
        padded_(sizes),
        query_(padded_.length * padded_.width),
        key_(sizes.head_dim * padded_.length),
        value_(padded_.length * padded_.width),
        scores_(kRows * padded_.length),
        out_(kRows * padded_.width) {}

  void run(float* out, float* log_sums, const float* qkv, const Head& head) {
    const auto [length, width] = padded_;
    pack(query_.data(), rows_at(qkv + head.query), width, scale_of(sizes_));
    pack_transposed(key_.data(), rows_at(qkv + head.key), length);
    pack(value_.data(), rows_at(qkv + head.value), width);
    const int64_t out_stride = sizes_.heads * sizes_.head_dim;
    for (int64_t first = 0; first < sizes_.length; first += kRows) {
      const int64_t rows = std::min(kRows, sizes_.length - first), seen = first + rows;
      const int64_t columns = round_up(first + kRows, kLanes);
      float* const scores = scores_.data();
      multiply(scores, length, {query_.data() + first * width, width, 1}, {key_.data(), length}, columns,
               sizes_.head_dim);
      float factors[kRows];
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t count = first + row + 1;
        const Normaliser made = exponentiate(scores + row * length, count, columns);
        log_sums[head.log_sums + first + row] = made.log_sum;
        factors[row] = made.factor;
      }
      multiply(out_.data(), width, {scores, length, 1}, {value_.data(), width}, width, seen);
      for (int64_t row = 0; row < rows; ++row) {
        unpack(out + head.out + (first + row) * out_stride, out_stride, out_.data() + row * width, width, 1,
               sizes_.head_dim, factors[row]);
      }
    }
  }

 private:
  HeadRows rows_at(const float* data) const { return {data, sizes_.row(), sizes_.length, sizes_.head_dim}; }

  const AttentionSizes& sizes_;
  Padded padded_;
  Scratch query_, key_, value_;  ///< (T, width), (D, length), (T, width)
  Scratch scores_, out_;         ///< of kRows queries
};

/// The backward pass of the query heads that share a key and a value.
class BackwardOfGroup {
 public:
  explicit BackwardOfGroup(const AttentionSizes& sizes)
      : sizes_(sizes),
        padded_(sizes),
        query_(padded_.length * padded_.width),
        key_(padded_.length * padded_.width),
        turned_key_(sizes.head_dim * padded_.length),
        turned_value_(sizes.head_dim * padded_.length),
        d_out_(padded_.length * padded_.width),
        d_query_(kRows * padded_.width),
        d_key_(padded_.length * padded_.width),
        d_value_(padded_.length * padded_.width),
        probabilities_(kBlock * padded_.length),
        d_scores_(kBlock * padded_.length) {}

  void run(float* d_qkv, const float* d_out, const float* qkv, const float* log_sums, int64_t batch,
           int64_t kv_head) {
    const int64_t group = sizes_.heads / sizes_.kv_heads, row = sizes_.row(), width = padded_.width;
    const Head shared(sizes_, batch, kv_head * group);
    pack(key_.data(), rows_at(qkv + shared.key, row), width);
    pack_transposed(turned_key_.data(), rows_at(qkv + shared.key, row), padded_.length);
    pack_transposed(turned_value_.data(), rows_at(qkv + shared.value, row), padded_.length);
    std::fill_n(d_key_.data(), padded_.length * width, 0.0f);
    std::fill_n(d_value_.data(), padded_.length * width, 0.0f);
    for (int64_t member = 0; member < group; ++member) {
      const Head head(sizes_, batch, kv_head * group + member);
      pack(query_.data(), rows_at(qkv + head.query, row), width, scale_of(sizes_));
      pack(d_out_.data(), rows_at(d_out + head.out, sizes_.heads * sizes_.head_dim), width);
      for (int64_t first = 0; first < sizes_.length; first += kBlock)
        run_block(d_qkv + head.query, log_sums + head.log_sums, first);
    }
    unpack(d_qkv + shared.key, row, d_key_.data(), width, sizes_.length, sizes_.head_dim);
    unpack(d_qkv + shared.value, row, d_value_.data(), width, sizes_.length, sizes_.head_dim);
  }

 private:
  HeadRows rows_at(const float* data, int64_t stride) const {
    return {data, stride, sizes_.length, sizes_.head_dim};
  }

  /// For queries from `first` on, writes their gradients and adds to those of keys and values.
  void run_block(float* d_query, const float* log_sums, int64_t first) {
    const auto [length, width] = padded_;
    const int64_t end = std::min(sizes_.length, first + kBlock);
    for (int64_t row = first; row < end; row += kRows) run_rows(d_query, log_sums, first, row);
    for (int64_t key = 0; key < end; key += kRows) {
      const int64_t from = std::max(first, key),
                    place = (from - first) * length + key;  // none before sees it
      multiply<true>(d_value_.data() + key * width, width, {probabilities_.data() + place, 1, length},
                     {d_out_.data() + from * width, width}, width, end - from);
      multiply<true>(d_key_.data() + key * width, width, {d_scores_.data() + place, 1, length},
                     {query_.data() + from * width, width}, width, end - from);
    }
  }

  /// Computes kRows queries from `row` on, in a block that begins at `first`.
  void run_rows(float* d_query, const float* log_sums, int64_t first, int64_t row) {
    const auto [length, width] = padded_;
    const int64_t rows = std::min(kRows, sizes_.length - row), columns = round_up(row + kRows, kLanes);
    float* const scores = probabilities_.data() + (row - first) * length;
    float* const d_scores = d_scores_.data() + (row - first) * length;
    multiply(scores, length, {query_.data() + row * width, width, 1}, {turned_key_.data(), length}, columns,
             sizes_.head_dim);
    multiply(d_scores, length, {d_out_.data() + row * width, width, 1}, {turned_value_.data(), length},
             columns, sizes_.head_dim);
    for (int64_t r = 0; r < rows; ++r)
      differentiate(scores + r * length, d_scores + r * length, log_sums[row + r], row + r + 1, columns);
    multiply(d_query_.data(), width, {d_scores, length, 1}, {key_.data(), width}, width, row + rows);
    unpack(d_query + row * sizes_.row(), sizes_.row(), d_query_.data(), width, rows, sizes_.head_dim,
           scale_of(sizes_));
  }

  const AttentionSizes& sizes_;
  Padded padded_;
  Scratch query_, key_;                ///< (length, width); queries times scale_of()
  Scratch turned_key_, turned_value_;  ///< (D, length)
  Scratch d_out_;                      ///< (length, width)
  Scratch d_query_, d_key_, d_value_;  ///< (kRows, width), (length, width), (length, width)
  Scratch probabilities_, d_scores_;   ///< (kBlock, length)
};

}  // namespace

void attention_forward(float* out, float* log_sums, const float* qkv, const AttentionSizes& sizes) {
  at::parallel_for(0, sizes.batch * sizes.heads, 1, [&](int64_t begin, int64_t end) {
    ForwardOfHead forward(sizes);
    for (int64_t index = begin; index < end; ++index)
      forward.run(out, log_sums, qkv, Head(sizes, index / sizes.heads, index % sizes.heads));
  });
}

void attention_backward(float* d_qkv, const float* d_out, const float* qkv, const float* log_sums,
                        const AttentionSizes& sizes) {
  at::parallel_for(0, sizes.batch * sizes.kv_heads, 1, [&](int64_t begin, int64_t end) {
    BackwardOfGroup backward(sizes);
    for (int64_t index = begin; index < end; ++index)
      backward.run(d_qkv, d_out, qkv, log_sums, index / sizes.kv_heads, index % sizes.kv_heads);
  });
}

}  // namespace trireme::kernels
