// Gradients summed per token in the kernel's order, bit for bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <tuple>

#include "tests/kernels/cuda_norm_support.h"
#include "tests/kernels/cuda_support.h"
#include "trireme/kernels/cuda_kernels.h"

namespace trireme::kernels::cuda {
namespace {

constexpr int64_t kVocabulary = 50;

/// Low tokens are far more frequent than high ones, and some do not occur.
at::Tensor skewed_tokens(int64_t count) {
  const at::Tensor uniform = at::rand({count}, at::TensorOptions().dtype(at::kDouble).device(at::kCUDA));
  return (uniform.pow(3) * static_cast<double>(kVocabulary)).floor().to(at::kLong);
}

at::TensorOptions of_tokens() {
  return at::TensorOptions().dtype(at::kLong).device(at::kCUDA);
}

/// The tokens in rising order, and the rows of dy they came from.
struct Batch {
  at::Tensor sorted, order;

  explicit Batch(const at::Tensor& tokens) {
    std::tie(sorted, order) = at::sort(tokens, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  }
};

/// Row `to` += the rows of dy at the positions [begin, end) of a batch, in the kernel's order: each window in
/// rising order, then every eighth window together, then these.
void add_run(float* to, const float* dy, const int64_t* order, int64_t begin, int64_t end, int64_t width) {
  constexpr int64_t kWindow = 64, kRows = 8;
  const int64_t first = begin / kWindow;
  for (int64_t column = 0; column < width; ++column) {
    std::array<float, kRows> rows{};
    for (int64_t window = first; window * kWindow < end; ++window) {
      float sum = 0.0f;
      for (int64_t i = std::max(begin, window * kWindow); i < std::min(end, (window + 1) * kWindow); ++i) {
        sum += dy[order[i] * width + column];
      }
      rows[static_cast<size_t>((window - first) % kRows)] += sum;
    }
    to[column] += std::accumulate(rows.begin() + 1, rows.end(), rows[0]);
  }
}

at::Tensor accumulated(const at::Tensor& dweight, const at::Tensor& dy, const Batch& batch) {
  const at::Tensor total = dweight.cpu().to(at::kFloat), rows = dy.cpu().to(at::kFloat);
  const at::Tensor sorted = batch.sorted.cpu(), order = batch.order.cpu();
  const int64_t* token = sorted.data_ptr<int64_t>();
  const int64_t count = rows.size(0), width = rows.size(1);
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    while (end < count && token[end] == token[begin]) ++end;
    add_run(total.data_ptr<float>() + token[begin] * width, rows.data_ptr<float>(), order.data_ptr<int64_t>(),
            begin, end, width);
  }
  return total.to(dweight.scalar_type());
}

/// The kernel's result between guards, with scratch memory that holds NaN between guards of its own.
at::Tensor run(const at::Tensor& dweight, const at::Tensor& dy, const Batch& batch, int64_t shift) {
  const int64_t count = dy.size(0), width = dy.size(1);
  const at::Tensor result = guarded_copy(dweight, shift);
  const at::Tensor scratch = guarded({embedding_scratch(count, width)}, at::kFloat, 0).fill_(NAN);
  EXPECT_EQ(
      embedding_backward(result.data_ptr(), dtype_of(result.scalar_type()), scratch.data_ptr<float>(),
                         dy.data_ptr(), batch.sorted.data_ptr<int64_t>(), batch.order.data_ptr<int64_t>(),
                         count, width, dtype_of(dy.scalar_type()), current_stream()),
      0);
  EXPECT_TRUE(guards_intact(result)) << count << " " << width << " " << shift;
  EXPECT_TRUE(guards_intact(scratch)) << count << " " << width << " " << shift;
  return result;
}

void check(const at::Tensor& tokens, int64_t rows, int64_t width, at::ScalarType type, int64_t shift) {
  for (const at::ScalarType sum_type : {type, at::kFloat}) {
    const at::Tensor dweight = guarded_noise({rows, width}, sum_type, 0);
    const at::Tensor dy = guarded_noise({tokens.numel(), width}, type, shift);
    const Batch batch(tokens);
    const at::Tensor result = run(dweight, dy, batch, shift);
    EXPECT_TRUE(at::equal(result.cpu(), accumulated(dweight, dy, batch)))
        << tokens.numel() << " tokens, width " << width << ", shift " << shift << ", sums in " << sum_type;
    EXPECT_TRUE(at::equal(result, run(dweight, dy, batch, shift)));
  }
}

class CudaEmbedding : public CudaDtypeTest {};

TEST_P(CudaEmbedding, BackwardAddsTheSumsInTheirOrder) {
  at::manual_seed(2);
  for (const int64_t width : {1, 7, 8, 64, 100, 768, 1024, 2048, 2056, 4096}) {
    for (const int64_t count : {1, 5, 64, 300, 3000}) {
      for (const int64_t shift : {0, 1}) check(skewed_tokens(count), kVocabulary, width, type(), shift);
    }
  }
}

TEST_P(CudaEmbedding, OneTokenMayBeTheWholeBatch) {
  at::manual_seed(3);
  for (const int64_t count : {15, 63, 64, 65, 128, 129, 5000}) {
    check(at::full({count}, 7, of_tokens()), kVocabulary, 768, type(), 0);
  }
  // More windows than the threads that count them, and exactly as many.
  for (const int64_t windows : {256, 257, 258, 513, 600}) {
    check(at::full({windows * 64}, 7, of_tokens()), kVocabulary, 8, type(), 0);
  }
}

TEST_P(CudaEmbedding, EveryTokenMayOccurOnce) {
  at::manual_seed(4);
  for (const int64_t count : {64, 1000}) {
    for (const int64_t shift : {0, 1}) check(at::randperm(count, of_tokens()), count, 136, type(), shift);
  }
}

TEST_P(CudaEmbedding, RunsMayBeginAndEndAnywhereInAWindow) {
  at::manual_seed(5);
  for (const int64_t before : {0, 1, 62, 63, 64, 65}) {
    for (const int64_t length : {1, 2, 63, 64, 65, 128, 129, 640, 700}) {
      at::Tensor tokens = at::full({before + length + 70}, 2, of_tokens());
      tokens.narrow(0, 0, before).fill_(0);
      tokens.narrow(0, before, length).fill_(1);
      for (const int64_t shift : {0, 1}) check(tokens, 3, 24, type(), shift);
    }
  }
}

TEST_P(CudaEmbedding, NoTokensAreNoWork) {
  EXPECT_EQ(embedding_scratch(0, 64), 0);
  EXPECT_EQ(embedding_backward(nullptr, dtype(), nullptr, nullptr, nullptr, nullptr, 0, 64, dtype(),
                               current_stream()),
            0);
}

TRIREME_FOR_EACH_DTYPE(CudaEmbedding);

}  // namespace
}  // namespace trireme::kernels::cuda
