#include "trireme/kernels/attention.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "trireme/kernels/scalar_math.h"

// BLAS, column-major; libtorch_cpu exports the one that it was built with.
extern "C" void sgemm_(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k,
                       const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                       const float* beta, float* c, const int* ldc);

namespace trireme::kernels {
namespace {

/// Query rows of one block: their products cover the keys up to the last row's, and masking does the rest.
constexpr int64_t kBlock = 64;

struct Matrix {
  const float* data;
  int64_t stride;  ///< floats from one row to the next
};

enum class Shape { kPlain, kTransposed };

/// C (rows, columns) = scale * op(A) op(B) + keep * C, row-major; `inner` is the dimension that is summed.
void multiply(float* c, int64_t c_stride, Matrix a, Shape a_shape, Matrix b, Shape b_shape, int64_t rows,
              int64_t columns, int64_t inner, float scale, float keep) {
  // Row-major C = A B is column-major C' = B' A'.
  const auto letter = [](Shape shape) { return shape == Shape::kPlain ? "N" : "T"; };
  const int m = static_cast<int>(columns), n = static_cast<int>(rows), k = static_cast<int>(inner);
  const int lda = static_cast<int>(b.stride), ldb = static_cast<int>(a.stride),
            ldc = static_cast<int>(c_stride);
  sgemm_(letter(b_shape), letter(a_shape), &m, &n, &k, &scale, b.data, &lda, a.data, &ldb, &keep, c, &ldc);
}

/// Softmax over the first `count` of `width` scores, zero for the rest.
void causal_softmax(float* scores, int64_t count, int64_t width) {
  float top = scores[0];
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < count; ++i) top = scores[i] > top ? scores[i] : top;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    scores[i] = exp_approx(scores[i] - top);
    sum += scores[i];
  }
  const float inverse = 1.0f / sum;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) scores[i] *= inverse;
  std::fill(scores + count, scores + width, 0.0f);
}

/// Gradient of the scores from that of the probabilities, in place; zero from `count` to `width`.
void softmax_gradient(float* grad, const float* probs, int64_t count, int64_t width, float scale) {
  float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < count; ++i) dot += grad[i] * probs[i];
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) grad[i] = probs[i] * (grad[i] - dot) * scale;
  std::fill(grad + count, grad + width, 0.0f);
}

/// Where the heads of one (batch, head) pair lie.
struct Head {
  Head(const AttentionSizes& sizes, int64_t batch, int64_t head)
      : query(batch * sizes.length * sizes.row() + head * sizes.head_dim),
        key(batch * sizes.length * sizes.row() +
            (sizes.heads + head / (sizes.heads / sizes.kv_heads)) * sizes.head_dim),
        value(key + sizes.kv_heads * sizes.head_dim),
        out(batch * sizes.length * sizes.heads * sizes.head_dim + head * sizes.head_dim),
        probs((batch * sizes.heads + head) * sizes.length * sizes.length) {}
  int64_t query, key, value, out, probs;
};

/// Backward of one head; key and value gradients are added to.
void head_backward(float* d_qkv, const float* d_out, const float* qkv, const float* probs,
                   const AttentionSizes& sizes, const Head& head, float* d_scores) {
  const int64_t row = sizes.row(), out_row = sizes.heads * sizes.head_dim, length = sizes.length;
  const int64_t width = sizes.head_dim;
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));
  for (int64_t first = 0; first < length; first += kBlock) {
    const int64_t rows = std::min(kBlock, length - first), seen = first + rows;
    const float* p = probs + head.probs + first * length;
    const Matrix grad{d_out + head.out + first * out_row, out_row};
    multiply(d_scores, seen, grad, Shape::kPlain, {qkv + head.value, row}, Shape::kTransposed, rows, seen,
             width, 1, 0);
    multiply(d_qkv + head.value, row, {p, length}, Shape::kTransposed, grad, Shape::kPlain, seen, width, rows,
             1, 1);
    for (int64_t r = 0; r < rows; ++r) {
      softmax_gradient(d_scores + r * seen, p + r * length, first + r + 1, seen, scale);
    }
    const Matrix scores{d_scores, seen};
    multiply(d_qkv + head.query + first * row, row, scores, Shape::kPlain, {qkv + head.key, row},
             Shape::kPlain, rows, width, seen, 1, 0);
    multiply(d_qkv + head.key, row, scores, Shape::kTransposed, {qkv + head.query + first * row, row},
             Shape::kPlain, seen, width, rows, 1, 1);
  }
}

}  // namespace

void attention_forward(float* out, float* probs, const float* qkv, const AttentionSizes& sizes) {
  const int64_t row = sizes.row(), out_row = sizes.heads * sizes.head_dim, length = sizes.length;
  const float scale = 1.0f / std::sqrt(static_cast<float>(sizes.head_dim));
  at::parallel_for(0, sizes.batch * sizes.heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      const Head head(sizes, index / sizes.heads, index % sizes.heads);
      for (int64_t first = 0; first < length; first += kBlock) {
        const int64_t rows = std::min(kBlock, length - first), seen = first + rows;
        float* p = probs + head.probs + first * length;
        multiply(p, length, {qkv + head.query + first * row, row}, Shape::kPlain, {qkv + head.key, row},
                 Shape::kTransposed, rows, seen, sizes.head_dim, scale, 0);
        for (int64_t r = 0; r < rows; ++r) causal_softmax(p + r * length, first + r + 1, seen);
        multiply(out + head.out + first * out_row, out_row, {p, length}, Shape::kPlain,
                 {qkv + head.value, row}, Shape::kPlain, rows, sizes.head_dim, seen, 1, 0);
      }
    }
  });
}

void attention_backward(float* d_qkv, const float* d_out, const float* qkv, const float* probs,
                        const AttentionSizes& sizes) {
  const int64_t group = sizes.heads / sizes.kv_heads, kv_width = 2 * sizes.kv_heads * sizes.head_dim;
  at::parallel_for(0, sizes.batch * sizes.length, 256, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float* keys_and_values = d_qkv + (token + 1) * sizes.row() - kv_width;
      std::fill(keys_and_values, keys_and_values + kv_width, 0.0f);
    }
  });
  at::parallel_for(0, sizes.batch * sizes.kv_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> d_scores(static_cast<size_t>(kBlock * sizes.length));
    for (int64_t index = begin; index < end; ++index) {
      for (int64_t member = 0; member < group; ++member) {
        const int64_t head = index % sizes.kv_heads * group + member;
        head_backward(d_qkv, d_out, qkv, probs, sizes, Head(sizes, index / sizes.kv_heads, head),
                      d_scores.data());
      }
    }
  });
}

}  // namespace trireme::kernels
