#include "trireme/kernels/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "trireme/base/round_up.h"
#include "trireme/kernels/range.h"
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

/// One head's queries, keys or values.
struct OneHead {
  const float* data;
  int64_t stride, count, width;
};

/// (count, padded) = scale * rows, with zeros beside them.
void pack(float* to, const OneHead& rows, int64_t padded, float scale = 1.0f) {
  for (int64_t row = 0; row < rows.count; ++row, to += padded) {
    const float* const from = rows.data + row * rows.stride;
    for (int64_t i = 0; i < rows.width; ++i) to[i] = scale * from[i];
    std::fill(to + rows.width, to + padded, 0.0f);
  }
}

/// (width, padded): the transpose of rows, with zeros beside it.
void pack_transposed(float* to, const OneHead& rows, int64_t padded) {
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
/// `columns`. `known_dot`: the sum of probability times gradient over all keys, where there are more.
void differentiate(float* scores, float* grad, float log_sum, const float* known_dot, int64_t count,
                   int64_t columns) {
  const int64_t whole = round_up(count, kLanes);
  std::fill(scores + count, scores + whole, kNothing);
  float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < whole; ++i) {
    scores[i] = exp_approx(scores[i] - log_sum);
    dot += scores[i] * grad[i];
  }
  if (known_dot != nullptr) dot = *known_dot;
#pragma omp simd
  for (int64_t i = 0; i < whole; ++i) grad[i] = scores[i] * (grad[i] - dot);
  std::fill(scores + count, scores + columns, 0.0f);
  std::fill(grad + count, grad + columns, 0.0f);
}

/// Rows and columns of what a thread works on: those of the problem, up to whole tiles.
struct Padded {
  explicit Padded(const AttentionPartSizes& sizes)
      : queries(whole_tiles(sizes.queries)),
        keys(whole_tiles(sizes.keys)),
        width(round_up(sizes.head_dim, kLanes)) {}
  static int64_t whole_tiles(int64_t rows) { return round_up(round_up(rows, kRows), kLanes); }
  int64_t queries, keys, width;
};

float scale_of(const AttentionPartSizes& sizes) {
  return 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
}

/// Tokens of one sequence whose queries see no other keys: all of them, or a document.
struct Stretch {
  int64_t batch, begin;
  int64_t queries, keys;
};

/// The heads of a stretch.
template <typename Float>
Float* head_at(const HeadRows<Float>& rows, const Stretch& stretch, int64_t head,
               const AttentionPartSizes& sizes) {
  return rows.data + stretch.batch * rows.batch_stride + stretch.begin * rows.stride + head * sizes.head_dim;
}
OneHead one_head(const HeadRows<const float>& rows, const Stretch& stretch, int64_t head, int64_t count,
                 const AttentionPartSizes& sizes) {
  return {head_at(rows, stretch, head, sizes), rows.stride, count, sizes.head_dim};
}
/// The place of a stretch in numbers (B, H, queries) of all sequences.
int64_t numbers_at(const Stretch& stretch, int64_t head, const AttentionPartSizes& all) {
  return (stretch.batch * all.heads + head) * all.queries + stretch.begin;
}

/// The keys that a tile of queries sees, kRows from `first` on.
class Mask {
 public:
  explicit Mask(const AttentionPartSizes& sizes) : sizes_(sizes), padded_keys_(Padded(sizes).keys) {}
  /// Keys that `query` sees.
  int64_t seen(int64_t query) const { return sizes_.is_causal ? query + 1 : sizes_.keys; }
  /// Columns of the tile's scores, whole vectors of which some query sees some.
  int64_t columns(int64_t first) const {
    return sizes_.is_causal ? round_up(first + kRows, kLanes) : padded_keys_;
  }
  /// The first query from `first` on that sees keys of the tile from `key` on.
  int64_t first_to_see(int64_t key, int64_t first) const {
    return sizes_.is_causal ? std::max(first, key) : first;
  }

 private:
  AttentionPartSizes sizes_;
  int64_t padded_keys_;
};

/// A problem of at most the sizes that memory was taken for.
class StretchAtHand {
 public:
  explicit StretchAtHand(const AttentionPartSizes& all) : all_(all), sizes_(all), padded_(all), mask_(all) {}

 protected:
  void narrow_to(const Stretch& stretch) {
    sizes_.queries = stretch.queries;
    sizes_.keys = stretch.keys;
    padded_ = Padded(sizes_);
    mask_ = Mask(sizes_);
  }

  const AttentionPartSizes& all_;
  AttentionPartSizes sizes_;  ///< of the stretch at hand
  Padded padded_;
  Mask mask_;
};

class ForwardOfHead : StretchAtHand {
 public:
  explicit ForwardOfHead(const AttentionPartSizes& sizes)
      : StretchAtHand(sizes),
        query_(padded_.queries * padded_.width),
        key_(sizes.head_dim * padded_.keys),
        value_(padded_.keys * padded_.width),
        scores_(kRows * padded_.keys),
        out_(kRows * padded_.width) {}

  void run(const HeadRows<float>& out, float* log_sums, const AttentionPartInput& input,
           const Stretch& stretch, int64_t head) {
    narrow_to(stretch);
    const int64_t kv_head = head / (sizes_.heads / sizes_.kv_heads), width = padded_.width;
    pack(query_.data(), one_head(input.query, stretch, head, sizes_.queries, sizes_), width,
         scale_of(sizes_));
    pack_transposed(key_.data(), one_head(input.key, stretch, kv_head, sizes_.keys, sizes_), padded_.keys);
    pack(value_.data(), one_head(input.value, stretch, kv_head, sizes_.keys, sizes_), width);
    float* const to = head_at(out, stretch, head, sizes_);
    float* const sums = log_sums + numbers_at(stretch, head, all_);
    for (int64_t first = 0; first < sizes_.queries; first += kRows)
      run_rows(to + first * out.stride, out.stride, sums + first, first);
  }

 private:
  /// Computes kRows queries from `first` on.
  void run_rows(float* out, int64_t out_stride, float* log_sums, int64_t first) {
    const int64_t width = padded_.width, length = padded_.keys;
    const int64_t rows = std::min(kRows, sizes_.queries - first), columns = mask_.columns(first);
    float* const scores = scores_.data();
    multiply(scores, length, {query_.data() + first * width, width, 1}, {key_.data(), length}, columns,
             sizes_.head_dim);
    float factors[kRows];
    for (int64_t row = 0; row < rows; ++row) {
      const Normaliser made = exponentiate(scores + row * length, mask_.seen(first + row), columns);
      log_sums[row] = made.log_sum;
      factors[row] = made.factor;
    }
    multiply(out_.data(), width, {scores, length, 1}, {value_.data(), width}, width,
             mask_.seen(first + rows - 1));
    for (int64_t row = 0; row < rows; ++row) {
      unpack(out + row * out_stride, out_stride, out_.data() + row * width, width, 1, sizes_.head_dim,
             factors[row]);
    }
  }

  Scratch query_, key_, value_;  ///< (queries, width), (D, keys), (keys, width)
  Scratch scores_, out_;         ///< of kRows queries
};

/// The numbers that backward reads for each query of a head.
struct QueryNumbers {
  const float* log_sums;
  const float* dots;  ///< nullptr: they follow from the keys
};

/// The backward pass of the query heads that share a key and a value.
class BackwardOfGroup : StretchAtHand {
 public:
  explicit BackwardOfGroup(const AttentionPartSizes& sizes)
      : StretchAtHand(sizes),
        query_(padded_.queries * padded_.width),
        key_(padded_.keys * padded_.width),
        turned_key_(sizes.head_dim * padded_.keys),
        turned_value_(sizes.head_dim * padded_.keys),
        d_out_(padded_.queries * padded_.width),
        d_query_(kRows * padded_.width),
        d_key_(padded_.keys * padded_.width),
        d_value_(padded_.keys * padded_.width),
        probabilities_(kBlock * padded_.keys),
        d_scores_(kBlock * padded_.keys) {}

  void run(const AttentionPartGradient& gradient, const HeadRows<const float>& d_out,
           const AttentionPartInput& input, const QueryNumbers& numbers, const Stretch& stretch,
           int64_t kv_head) {
    narrow_to(stretch);
    const int64_t group = sizes_.heads / sizes_.kv_heads, width = padded_.width;
    const OneHead key = one_head(input.key, stretch, kv_head, sizes_.keys, sizes_);
    pack(key_.data(), key, width);
    pack_transposed(turned_key_.data(), key, padded_.keys);
    pack_transposed(turned_value_.data(), one_head(input.value, stretch, kv_head, sizes_.keys, sizes_),
                    padded_.keys);
    std::fill_n(d_key_.data(), padded_.keys * width, 0.0f);
    std::fill_n(d_value_.data(), padded_.keys * width, 0.0f);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      pack(query_.data(), one_head(input.query, stretch, head, sizes_.queries, sizes_), width,
           scale_of(sizes_));
      pack(d_out_.data(), one_head(d_out, stretch, head, sizes_.queries, sizes_), width);
      const int64_t place = numbers_at(stretch, head, all_);
      const QueryNumbers its{numbers.log_sums + place, numbers.dots ? numbers.dots + place : nullptr};
      for (int64_t first = 0; first < sizes_.queries; first += kBlock)
        run_block(head_at(gradient.query, stretch, head, sizes_), gradient.query.stride, its, first);
    }
    unpack(head_at(gradient.key, stretch, kv_head, sizes_), gradient.key.stride, d_key_.data(), width,
           sizes_.keys, sizes_.head_dim);
    unpack(head_at(gradient.value, stretch, kv_head, sizes_), gradient.value.stride, d_value_.data(), width,
           sizes_.keys, sizes_.head_dim);
  }

 private:
  /// For queries from `first` on, writes their gradients and adds to those of keys and values.
  void run_block(float* d_query, int64_t stride, const QueryNumbers& numbers, int64_t first) {
    const int64_t length = padded_.keys, width = padded_.width;
    const int64_t end = std::min(sizes_.queries, first + kBlock), seen = mask_.seen(end - 1);
    for (int64_t row = first; row < end; row += kRows) run_rows(d_query, stride, numbers, first, row);
    for (int64_t key = 0; key < seen; key += kRows) {
      const int64_t from = mask_.first_to_see(key, first), place = (from - first) * length + key;
      multiply<true>(d_value_.data() + key * width, width, {probabilities_.data() + place, 1, length},
                     {d_out_.data() + from * width, width}, width, end - from);
      multiply<true>(d_key_.data() + key * width, width, {d_scores_.data() + place, 1, length},
                     {query_.data() + from * width, width}, width, end - from);
    }
  }

  /// Computes kRows queries from `row` on, in a block that begins at `first`.
  void run_rows(float* d_query, int64_t stride, const QueryNumbers& numbers, int64_t first, int64_t row) {
    const int64_t length = padded_.keys, width = padded_.width;
    const int64_t rows = std::min(kRows, sizes_.queries - row), columns = mask_.columns(row);
    float* const scores = probabilities_.data() + (row - first) * length;
    float* const d_scores = d_scores_.data() + (row - first) * length;
    multiply(scores, length, {query_.data() + row * width, width, 1}, {turned_key_.data(), length}, columns,
             sizes_.head_dim);
    multiply(d_scores, length, {d_out_.data() + row * width, width, 1}, {turned_value_.data(), length},
             columns, sizes_.head_dim);
    for (int64_t r = 0; r < rows; ++r) {
      differentiate(scores + r * length, d_scores + r * length, numbers.log_sums[row + r],
                    numbers.dots ? numbers.dots + row + r : nullptr, mask_.seen(row + r), columns);
    }
    multiply(d_query_.data(), width, {d_scores, length, 1}, {key_.data(), width}, width,
             mask_.seen(row + rows - 1));
    unpack(d_query + row * stride, stride, d_query_.data(), width, rows, sizes_.head_dim, scale_of(sizes_));
  }

  Scratch query_, key_;                ///< (queries, width) times scale_of(), (keys, width)
  Scratch turned_key_, turned_value_;  ///< (D, keys)
  Scratch d_out_;                      ///< (queries, width)
  Scratch d_query_, d_key_, d_value_;  ///< (kRows, width), (keys, width), (keys, width)
  Scratch probabilities_, d_scores_;   ///< (kBlock, keys)
};

/// The three kinds of heads of packed projections (B, T, row()).
template <typename Float>
std::array<HeadRows<Float>, 3> unpacked(Float* qkv, const AttentionSizes& sizes) {
  const int64_t row = sizes.row(), key = sizes.heads * sizes.head_dim,
                value = key + sizes.kv_heads * sizes.head_dim;
  const auto at = [&](int64_t first) { return HeadRows<Float>{qkv + first, sizes.length * row, row}; };
  return {at(0), at(key), at(value)};
}

AttentionPartInput packed_input(const float* qkv, const AttentionSizes& sizes) {
  const auto [query, key, value] = unpacked(qkv, sizes);
  return {query, key, value};
}

/// Outputs (B, T, H * head_dim).
template <typename Float>
HeadRows<Float> outputs(Float* data, const AttentionSizes& sizes) {
  const int64_t row = sizes.heads * sizes.head_dim;
  return {data, sizes.length * row, row};
}

AttentionPartSizes causal(const AttentionSizes& sizes) {
  return {sizes.batch, sizes.length, sizes.length, sizes.heads, sizes.kv_heads, sizes.head_dim, true};
}

/// The stretches of each sequence.
using Stretches = std::vector<std::vector<Stretch>>;

Stretches whole_sequences(const AttentionPartSizes& sizes) {
  Stretches all;
  for (int64_t batch = 0; batch < sizes.batch; ++batch)
    all.push_back({{.batch = batch, .begin = 0, .queries = sizes.queries, .keys = sizes.keys}});
  return all;
}

std::vector<Stretch> documents_of(const int32_t* starts, int64_t batch, int64_t length) {
  std::vector<Stretch> documents;
  for (int64_t token = 0; token < length; ++token) {
    if (token == 0 || starts[token] == token)
      documents.push_back({.batch = batch, .begin = token, .queries = 0, .keys = 0});
    Stretch& document = documents.back();
    document.queries = document.keys = token + 1 - document.begin;
  }
  return documents;
}

Stretches stretches_of(const int32_t* starts, const AttentionPartSizes& sizes) {
  if (starts == nullptr) return whole_sequences(sizes);
  Stretches all;
  for (int64_t batch = 0; batch < sizes.batch; ++batch)
    all.push_back(documents_of(starts + batch * sizes.queries, batch, sizes.queries));
  return all;
}

void run_forward(const HeadRows<float>& out, float* log_sums, const AttentionPartInput& input,
                 const AttentionPartSizes& sizes, const Stretches& stretches) {
  const OperatorRange traced("trireme::attention_forward");
  at::parallel_for(0, sizes.batch * sizes.heads, 1, [&](int64_t begin, int64_t end) {
    ForwardOfHead forward(sizes);
    for (int64_t index = begin; index < end; ++index) {
      for (const Stretch& stretch : stretches[static_cast<size_t>(index / sizes.heads)])
        forward.run(out, log_sums, input, stretch, index % sizes.heads);
    }
  });
}

void run_backward(const AttentionPartGradient& gradient, const HeadRows<const float>& d_out,
                  const AttentionPartInput& input, const QueryNumbers& numbers,
                  const AttentionPartSizes& sizes, const Stretches& stretches) {
  const OperatorRange traced("trireme::attention_backward");
  at::parallel_for(0, sizes.batch * sizes.kv_heads, 1, [&](int64_t begin, int64_t end) {
    BackwardOfGroup backward(sizes);
    for (int64_t index = begin; index < end; ++index) {
      for (const Stretch& stretch : stretches[static_cast<size_t>(index / sizes.kv_heads)])
        backward.run(gradient, d_out, input, numbers, stretch, index % sizes.kv_heads);
    }
  });
}

}  // namespace

void attention_part_forward(const HeadRows<float>& out, float* log_sums, const AttentionPartInput& input,
                            const AttentionPartSizes& sizes) {
  run_forward(out, log_sums, input, sizes, whole_sequences(sizes));
}

void attention_part_backward(const AttentionPartGradient& gradient, const HeadRows<const float>& d_out,
                             const AttentionPartInput& input, const float* log_sums, const float* dots,
                             const AttentionPartSizes& sizes) {
  run_backward(gradient, d_out, input, {log_sums, dots}, sizes, whole_sequences(sizes));
}

void attention_forward(float* out, float* log_sums, const float* qkv, const AttentionSizes& sizes,
                       const int32_t* starts) {
  const AttentionPartSizes all = causal(sizes);
  run_forward(outputs(out, sizes), log_sums, packed_input(qkv, sizes), all, stretches_of(starts, all));
}

void attention_backward(float* d_qkv, const float* d_out, const float* qkv, const float* log_sums,
                        const AttentionSizes& sizes, const int32_t* starts) {
  const auto [query, key, value] = unpacked(d_qkv, sizes);
  const AttentionPartSizes all = causal(sizes);
  run_backward({query, key, value}, outputs(d_out, sizes), packed_input(qkv, sizes), {log_sums, nullptr}, all,
               stretches_of(starts, all));
}

}  // namespace trireme::kernels
