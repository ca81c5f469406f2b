// Gradients summed per token in the order of the definition, bit for bit.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

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

template <typename Body>
void for_sizes(const Body& body) {
  for (const int64_t width : {1, 7, 8, 64, 100, 768, 1024, 2048, 2056, 4096}) {
    for (const int64_t count : {1, 5, 300, 3000}) {
      for (const int64_t shift : {0, 1}) body(count, width, shift);
    }
  }
}

/// weight + the fp32 sum, from the first occurrence to the last, of dy where the token is the row's.
at::Tensor accumulated(const at::Tensor& dweight, const at::Tensor& dy, const at::Tensor& tokens) {
  const at::Tensor rows = dy.cpu().to(at::kFloat), names = tokens.cpu();
  const at::Tensor sums = at::zeros(dweight.sizes(), at::kFloat);
  const int64_t count = rows.size(0), width = rows.size(1);
  for (int64_t i = 0; i < count; ++i) {
    const float* from = rows.data_ptr<float>() + i * width;
    float* to = sums.data_ptr<float>() + names.data_ptr<int64_t>()[i] * width;
    for (int64_t column = 0; column < width; ++column) to[column] += from[column];
  }
  return (dweight.cpu().to(at::kFloat) + sums).to(dweight.scalar_type());
}

class CudaEmbedding : public CudaDtypeTest {};

TEST_P(CudaEmbedding, BackwardAddsTheSumInRisingOrder) {
  at::manual_seed(2);
  for_sizes([&](int64_t count, int64_t width, int64_t shift) {
    const at::Tensor before = guarded_noise({kVocabulary, width}, type(), shift);
    const at::Tensor dy = guarded_noise({count, width}, type(), shift);
    const at::Tensor tokens = skewed_tokens(count);
    const auto [sorted, order] = at::sort(tokens, /*stable=*/true, /*dim=*/0, /*descending=*/false);
    const at::Tensor dweight = guarded_copy(before, shift);
    ASSERT_EQ(embedding_backward(dweight.data_ptr(), dy.data_ptr(), sorted.data_ptr<int64_t>(),
                                 order.data_ptr<int64_t>(), count, width, dtype(), current_stream()),
              0);
    EXPECT_TRUE(at::equal(dweight.cpu(), accumulated(before, dy, tokens)))
        << count << " " << width << " " << shift;
    EXPECT_TRUE(guards_intact(dweight)) << count << " " << width << " " << shift;
  });
}

TEST_P(CudaEmbedding, OneTokenMayBeTheWholeBatch) {
  at::manual_seed(3);
  for (const int64_t count : {15, 16, 17, 31, 32, 33, 5000}) {
    const at::Tensor before = guarded_noise({kVocabulary, 768}, type(), 0);
    const at::Tensor dy = guarded_noise({count, 768}, type(), 0);
    const at::Tensor tokens = at::full({count}, 7, at::TensorOptions().dtype(at::kLong).device(at::kCUDA));
    const at::Tensor order = at::arange(count, tokens.options());
    const at::Tensor dweight = guarded_copy(before, 0);
    ASSERT_EQ(embedding_backward(dweight.data_ptr(), dy.data_ptr(), tokens.data_ptr<int64_t>(),
                                 order.data_ptr<int64_t>(), count, 768, dtype(), current_stream()),
              0);
    EXPECT_TRUE(at::equal(dweight.cpu(), accumulated(before, dy, tokens))) << count;
  }
}

TEST_P(CudaEmbedding, NoTokensAreNoWork) {
  EXPECT_EQ(embedding_backward(nullptr, nullptr, nullptr, nullptr, 0, 64, dtype(), current_stream()), 0);
}

TRIREME_FOR_EACH_DTYPE(CudaEmbedding);

}  // namespace
}  // namespace trireme::kernels::cuda
