// Softmax cross-entropy on the GPU against ATen in double.
#include <cmath>
#include <limits>
#include <vector>

#include "tests/kernels/cuda_support.h"
#include "trireme/kernels/cross_entropy.h"

namespace trireme::kernels::cuda {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kScale = 0.125f;

class CrossEntropy : public CudaDtypeTest {
 protected:
  // Probabilities below 1, times kScale, with fp32's rounding and the spacing of fp16's subnormal numbers.
  static constexpr double kAbsolute = 1e-7;

  at::Tensor logits(int64_t rows, int64_t stride) const { return noise({rows, stride}, type(), 21, 4.0); }
};
TRIREME_FOR_EACH_DTYPE(CrossEntropy);

at::Tensor spread_targets(int64_t rows, int64_t classes) {
  // Both ends of the row come first.
  const at::Tensor targets = (at::arange(rows, at::kLong) * 7919 + 1).remainder(classes);
  targets[0] = classes - 1;
  if (rows > 1) targets[1] = 0;
  return targets.cuda();
}

/// Runs the kernel over `logits` and returns the losses.
at::Tensor run(const at::Tensor& logits, const at::Tensor& targets, int64_t classes,
               bool want_gradient = true) {
  const int64_t rows = logits.size(0);
  const at::Tensor loss = at::full({rows}, NAN, logits.options().dtype(at::kFloat));
  EXPECT_EQ(0, cross_entropy(loss.data_ptr<float>(), logits.data_ptr(), targets.data_ptr<int64_t>(), rows,
                             classes, logits.size(1), kScale, want_gradient, dtype_of(logits.scalar_type()),
                             current_stream()));
  return loss;
}

struct Exact {
  at::Tensor loss, gradient;
};

/// Loss and scaled gradient in double; the gradient has the padding.
Exact exactly(const at::Tensor& logits, const at::Tensor& targets, int64_t classes) {
  const at::Tensor z = in_double(logits).narrow(1, 0, classes);
  const at::Tensor index = targets.cpu().clamp_min(0).unsqueeze(1);
  const at::Tensor kept = targets.cpu().ne(kIgnoredTarget).to(at::kDouble);
  const at::Tensor loss = at::logsumexp(z, {1}) - z.gather(1, index).squeeze(1);
  at::Tensor gradient = at::softmax(z, 1);
  gradient.scatter_add_(1, index, at::full(index.sizes(), -1.0, at::kDouble));
  gradient = at::where(kept.unsqueeze(1).gt(0), gradient * static_cast<double>(kScale), 0.0);
  return {at::where(kept.gt(0), loss, 0.0), at::constant_pad_nd(gradient, {0, logits.size(1) - classes})};
}

struct Sizes {
  int64_t rows, classes, stride;
  std::string name() const {
    return std::to_string(rows) + "x" + std::to_string(classes) + " of " + std::to_string(stride);
  }
};
// One class, rows without full packs, padding within and beyond the last pack, rows that are kept in shared
// memory whole and in part, and both sizes of blocks.
const Sizes kSizes[] = {{1, 1, 1},         {3, 7, 7},           {5, 65, 72},        {2, 8, 8},
                        {4, 1000, 1000},   {4, 1001, 1024},     {3, 16384, 16384},  {3, 50257, 50304},
                        {2, 50257, 50257}, {2, 128256, 128256}, {2, 128251, 128512}};

TEST_P(CrossEntropy, FollowsTheFormula) {
  for (const Sizes& sizes : kSizes) {
    const at::Tensor z = logits(sizes.rows, sizes.stride),
                     targets = spread_targets(sizes.rows, sizes.classes);
    const Exact exact = exactly(z, targets, sizes.classes);
    for (const at::Tensor& work : {z.clone(), unaligned(z)}) {
      const at::Tensor loss = run(work, targets, sizes.classes);
      expect_close(loss, exact.loss, 2e-6, 4e-6, sizes.name() + " loss");
      expect_close(work, exact.gradient, relative(), kAbsolute, sizes.name() + " gradient");
    }
  }
}

TEST_P(CrossEntropy, WithoutGradientLogitsStay) {
  for (const Sizes& sizes : kSizes) {
    const at::Tensor z = logits(sizes.rows, sizes.stride),
                     targets = spread_targets(sizes.rows, sizes.classes);
    const at::Tensor work = z.clone();
    const at::Tensor loss = run(work, targets, sizes.classes, false);
    expect_close(loss, exactly(z, targets, sizes.classes).loss, 2e-6, 4e-6, sizes.name());
    EXPECT_TRUE(at::equal(work, z)) << sizes.name();
  }
}

TEST_P(CrossEntropy, SameBitsEveryTime) {
  for (const Sizes& sizes : kSizes) {
    const at::Tensor first = logits(sizes.rows, sizes.stride), second = first.clone();
    const at::Tensor targets = spread_targets(sizes.rows, sizes.classes);
    EXPECT_TRUE(at::equal(run(first, targets, sizes.classes), run(second, targets, sizes.classes)));
    EXPECT_TRUE(at::equal(first, second)) << sizes.name();
  }
}

TEST_P(CrossEntropy, IgnoredRowsHaveNoLossAndNoGradient) {
  for (const Sizes& sizes : {Sizes{4, 1001, 1024}, Sizes{4, 1001, 1003}}) {
    const at::Tensor z = logits(sizes.rows, sizes.stride),
                     targets = spread_targets(sizes.rows, sizes.classes);
    targets[1] = kIgnoredTarget;
    targets[3] = kIgnoredTarget;
    const Exact exact = exactly(z, targets, sizes.classes);
    z[3].fill_(NAN);  // such a row may hold anything
    const at::Tensor loss = run(z, targets, sizes.classes);
    expect_close(loss, exact.loss, 2e-6, 4e-6, "loss");
    expect_close(z, exact.gradient, relative(), kAbsolute, "gradient");
    EXPECT_EQ(z[1].count_nonzero().item<int64_t>() + z[3].count_nonzero().item<int64_t>(), 0);
  }
}

TEST_P(CrossEntropy, TargetsThatAreNoClassGiveNanInTheirRowAlone) {
  for (const Sizes& sizes : {Sizes{6, 1001, 1024}, Sizes{6, 1001, 1003}}) {
    const at::Tensor z = logits(sizes.rows, sizes.stride),
                     targets = spread_targets(sizes.rows, sizes.classes);
    const Exact exact = exactly(z, targets, sizes.classes);
    targets[1] = -1;
    targets[3] = sizes.classes;
    targets[4] = int64_t{1} << 40;
    const at::Tensor loss = run(z, targets, sizes.classes);
    for (const int64_t row : {1, 3, 4}) {
      EXPECT_TRUE(loss[row].isnan().item<bool>()) << row;
      EXPECT_TRUE(z[row].narrow(0, 0, sizes.classes).isnan().all().item<bool>()) << row;
      EXPECT_EQ(z[row].narrow(0, sizes.classes, sizes.stride - sizes.classes).count_nonzero().item<int64_t>(),
                0);
    }
    for (const int64_t row : {0, 2, 5}) {
      expect_close(loss[row], exact.loss[row], 2e-6, 4e-6, "loss");
      expect_close(z[row], exact.gradient[row], relative(), kAbsolute, "gradient");
    }
  }
}

TEST_P(CrossEntropy, PaddingIsNeverRead) {
  const at::Tensor z = logits(3, 1024), targets = spread_targets(3, 1001);
  const Exact exact = exactly(z, targets, 1001);
  z.narrow(1, 1001, 23).fill_(NAN);
  expect_close(run(z, targets, 1001), exact.loss, 2e-6, 4e-6, "loss");
  expect_close(z, exact.gradient, relative(), kAbsolute, "gradient");
}

TEST_P(CrossEntropy, MaskedLogitsHaveNoProbability) {
  // All but the target masked; whole packs and whole threads masked; a prefix masked.
  const at::Tensor z = logits(3, 20000);
  const at::Tensor targets = at::tensor({5L, 9000L, 19999L}, at::kLong).cuda();
  z[0].narrow(0, 0, 5).fill_(-kInfinity);
  z[0].narrow(0, 6, 19994).fill_(-kInfinity);
  z[1].narrow(0, 0, 8992).fill_(-kInfinity);
  z[1].narrow(0, 9100, 10900).fill_(-kInfinity);
  z[2].narrow(0, 0, 4096).fill_(-kInfinity);
  const Exact exact = exactly(z, targets, 20000);
  const at::Tensor loss = run(z, targets, 20000);
  expect_close(loss, exact.loss, 2e-6, 4e-6, "loss");
  expect_close(z, exact.gradient, relative(), kAbsolute, "gradient");
  EXPECT_EQ(loss[0].item<float>(), 0.0f);
}

TEST_P(CrossEntropy, LargeLogitsDoNotOverflow) {
  const at::Tensor z = logits(3, 1000) * 1000.0, targets = spread_targets(3, 1000);
  const Exact exact = exactly(z, targets, 1000);
  expect_close(run(z, targets, 1000), exact.loss, 2e-6, 4e-6, "loss");
  expect_close(z, exact.gradient, relative(), kAbsolute, "gradient");
}

TEST_P(CrossEntropy, BrokenLogitsAreNotHidden) {
  const double kBroken[] = {NAN, kInfinity};
  for (const double broken : kBroken) {
    for (const int64_t column : {0, 777, 19999}) {
      const at::Tensor z = logits(2, 20008), targets = spread_targets(2, 20000);
      z[0][column] = broken;
      const at::Tensor loss = run(z, targets, 20000);
      EXPECT_FALSE(std::isfinite(loss[0].item<float>())) << broken << " in column " << column;
      EXPECT_TRUE(std::isfinite(loss[1].item<float>()));
      EXPECT_EQ(z.narrow(1, 20000, 8).count_nonzero().item<int64_t>(), 0);
    }
  }
  const at::Tensor all_masked = at::full_like(logits(1, 1000), -kInfinity);
  EXPECT_FALSE(std::isfinite(run(all_masked, spread_targets(1, 1000), 1000)[0].item<float>()));
}

using CrossEntropyLimits = CudaTest;

TEST_F(CrossEntropyLimits, NothingToDoIsNoError) {
  EXPECT_EQ(0, cross_entropy(nullptr, nullptr, nullptr, 0, 1000, 1000, 1.0f, true, Dtype::kFloat,
                             current_stream()));
}

TEST_F(CrossEntropyLimits, MoreThanTwoToThe31Elements) {
  const int64_t classes = 128256, rows = (int64_t{1} << 31) / classes + 9;
  if (!has_memory_for(2 * rows * classes)) GTEST_SKIP() << "needs 6 GB of GPU memory";
  const at::Tensor row = noise({1, classes}, at::kBFloat16, 22);
  const at::Tensor targets = at::full({rows}, 77, row.options().dtype(at::kLong));
  const at::Tensor z = row.expand({rows, classes}).contiguous();
  const at::Tensor loss = run(z, targets, classes);
  const at::Tensor row_loss = run(row, targets.narrow(0, 0, 1), classes);
  EXPECT_TRUE(loss.eq(row_loss).all().item<bool>());
  for (const int64_t r : {int64_t{0}, rows / 2, rows - 1}) {
    EXPECT_TRUE(at::equal(z.narrow(0, r, 1), row)) << r;
  }
}

}  // namespace
}  // namespace trireme::kernels::cuda
