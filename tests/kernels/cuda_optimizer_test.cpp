// Optimizer kernels against the CPU ones; an element gets the same bits wherever its range begins.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>

#include "tests/kernels/cuda_norm_support.h"
#include "tests/kernels/cuda_support.h"
#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/optimizer.h"

namespace trireme::kernels::cuda {
namespace {

constexpr int kSteps = 3;
constexpr float kOnHost = 0.5f, kOnGpu = 0.25f;  // the two factors of gradients: powers of two, so exact

AdamWStep adamw_step(int t, float grad_scale) {
  const float beta1 = 0.9f, beta2 = 0.95f;
  return {beta1,
          beta2,
          1e-8f,
          1.0f - std::pow(beta1, static_cast<float>(t)),
          1.0f - std::pow(beta2, static_cast<float>(t)),
          grad_scale};
}

SgdStep sgd_step(int t, float grad_scale) {
  return {0.9f, grad_scale, t == 1};
}

/// More than one launch takes, with settings of their own, empty ones and gaps between.
std::vector<UpdatePart> parts_of(int64_t count) {
  std::vector<UpdatePart> parts;
  int64_t begin = 0;
  for (int64_t i = 1; begin < count; ++i) {
    const int64_t end = i < 40 ? std::min(count, begin + i * i % 97) : count;
    parts.push_back({begin, end, 0.1f / static_cast<float>(i % 3 + 1), i % 2 == 0 ? 0.1f : 0.0f});
    begin = std::min(count, end + i % 4);
  }
  return parts;
}

/// Elements of no part are not copied.
at::Tensor copy_of_parts(const at::Tensor& param, at::ScalarType type) {
  at::Tensor copy = at::full_like(param, kSentinel, param.options().dtype(type));
  for (const UpdatePart& part : parts_of(param.numel()))
    copy.slice(0, part.begin, part.end).copy_(param.slice(0, part.begin, part.end));
  return copy;
}

std::vector<UpdatePart> one_part(int64_t count) {
  return {{0, count, 0.1f, 0.1f}};
}

/// How far param, first state, second state, gradient and copy lie off a 16-byte boundary, in elements.
using Shifts = std::array<int64_t, 5>;
constexpr Shifts kAligned{0, 0, 0, 0, 0};
constexpr std::array<Shifts, 6> kShifts{
    {kAligned, {1, 1, 1, 1, 1}, {2, 2, 2, 2, 2}, {3, 3, 3, 3, 3}, {0, 1, 2, 3, 0}, {0, 0, 0, 0, 1}}};

struct State {
  at::Tensor param, first, second, grad, copy;

  static State random(int64_t count) {
    const auto noise = [&] { return guarded_noise({count}, at::kFloat, 0); };
    return {noise(), noise(), noise().square_().add_(0.01), noise(), {}};
  }
  State placed(const Shifts& shifts, at::ScalarType copy_type) const {
    return {guarded_copy(param, shifts[0]), guarded_copy(first, shifts[1]), guarded_copy(second, shifts[2]),
            guarded_copy(grad, shifts[3]), guarded(param.sizes(), copy_type, shifts[4])};
  }
  State on_cpu() const { return {param.cpu(), first.cpu(), second.cpu(), grad.cpu(), {}}; }
  int64_t count() const { return param.numel(); }
  Moments moments() const { return {.values = {first.data_ptr(), second.data_ptr()}}; }
  bool intact() const {
    return guards_intact(param) && guards_intact(first) && guards_intact(second) && guards_intact(copy);
  }
};

at::Tensor gpu_scale() {
  return at::full({1}, kOnGpu, at::TensorOptions().dtype(at::kFloat).device(at::kCUDA));
}

State after_adamw(const State& start, const Shifts& shifts, at::ScalarType copy_type) {
  const State s = start.placed(shifts, copy_type);
  const at::Tensor scale = gpu_scale();
  for (int t = 1; t <= kSteps; ++t) {
    EXPECT_EQ(adamw(floats(s.param), s.moments(), floats(s.grad), Dtype::kFloat, s.copy.data_ptr(),
                    dtype_of(copy_type), parts_of(s.count()), adamw_step(t, kOnHost), floats(scale),
                    current_stream()),
              0);
  }
  return s;
}

State after_sgd(const State& start, const Shifts& shifts, at::ScalarType copy_type) {
  const State s = start.placed(shifts, copy_type);
  const at::Tensor scale = gpu_scale();
  for (int t = 1; t <= kSteps; ++t) {
    EXPECT_EQ(
        sgd(floats(s.param), s.moments(), floats(s.grad), Dtype::kFloat, s.copy.data_ptr(),
            dtype_of(copy_type), parts_of(s.count()), sgd_step(t, kOnHost), floats(scale), current_stream()),
        0);
  }
  return s;
}

State adamw_on_cpu(const State& start) {
  const State s = start.on_cpu();
  for (int t = 1; t <= kSteps; ++t) {
    kernels::adamw(floats(s.param), s.moments(), floats(s.grad), nullptr, parts_of(s.count()),
                   adamw_step(t, kOnHost * kOnGpu));
  }
  return s;
}

State sgd_on_cpu(const State& start) {
  const State s = start.on_cpu();
  for (int t = 1; t <= kSteps; ++t) {
    kernels::sgd(floats(s.param), s.moments(), floats(s.grad), nullptr, parts_of(s.count()),
                 sgd_step(t, kOnHost * kOnGpu));
  }
  return s;
}

/// A few roundings of fp32 apart: the CPU may fuse other products.
void expect_near(const at::Tensor& actual, const at::Tensor& on_cpu, const std::string& what) {
  const at::Tensor exact = on_cpu.to(at::kCUDA).to(at::kDouble);
  expect_within(actual, exact, 3e-6 * (exact.abs() + 1.0), what);
}

template <typename OnGpu, typename OnCpu>
void check(at::ScalarType copy_type, const OnGpu& on_gpu, const OnCpu& on_cpu) {
  for (const int64_t count : {1, 3, 4, 5, 1000, 100003, 5000001}) {
    const std::string what = "count " + std::to_string(count);
    const State start = State::random(count);
    const State expected = on_cpu(start);
    const State aligned = on_gpu(start, kAligned, copy_type);
    expect_near(aligned.param, expected.param, what + " param");
    expect_near(aligned.first, expected.first, what + " first state");
    expect_near(aligned.second, expected.second, what + " second state");
    for (const Shifts& shifts : kShifts) {
      const State moved = on_gpu(start, shifts, copy_type);
      EXPECT_TRUE(at::equal(moved.param, aligned.param)) << what;
      EXPECT_TRUE(at::equal(moved.first, aligned.first)) << what;
      EXPECT_TRUE(at::equal(moved.second, aligned.second)) << what;
      EXPECT_TRUE(at::equal(moved.copy, copy_of_parts(moved.param, copy_type))) << what;
      EXPECT_TRUE(moved.intact()) << what;
    }
  }
}

class CudaOptimizer : public CudaDtypeTest {};

TEST_P(CudaOptimizer, AdamWEqualsTheCpuAtAnyAlignment) {
  at::manual_seed(1);
  check(type(), after_adamw, adamw_on_cpu);
}

TEST_P(CudaOptimizer, SgdEqualsTheCpuAtAnyAlignment) {
  at::manual_seed(2);
  check(type(), after_sgd, sgd_on_cpu);
}

TRIREME_FOR_EACH_DTYPE(CudaOptimizer);

class CudaOptimizerRange : public CudaTest {};

TEST_F(CudaOptimizerRange, CopyAndScaleOnTheGpuMayBeMissing) {
  at::manual_seed(3);
  const State start = State::random(1001);
  const State with = start.placed(kAligned, at::kBFloat16), without = start.placed(kAligned, at::kBFloat16);
  const at::Tensor scale = gpu_scale();
  ASSERT_EQ(adamw(floats(with.param), with.moments(), floats(with.grad), Dtype::kFloat, with.copy.data_ptr(),
                  Dtype::kBFloat16, one_part(with.count()), adamw_step(1, kOnHost), floats(scale),
                  current_stream()),
            0);
  ASSERT_EQ(adamw(floats(without.param), without.moments(), floats(without.grad), Dtype::kFloat, nullptr,
                  Dtype::kBFloat16, one_part(without.count()), adamw_step(1, kOnHost * kOnGpu), nullptr,
                  current_stream()),
            0);
  EXPECT_TRUE(at::equal(with.param, without.param));
  EXPECT_TRUE(without.copy.eq(kSentinel).all().item<bool>());
}

TEST_F(CudaOptimizerRange, FirstStepOfSgdIgnoresWhatTheBufferHolds) {
  const State s = State::random(1001).placed(kAligned, at::kFloat);
  s.first.fill_(std::nan(""));
  ASSERT_EQ(sgd(floats(s.param), s.moments(), floats(s.grad), Dtype::kFloat, nullptr, Dtype::kFloat,
                one_part(s.count()), sgd_step(1, 1.0f), nullptr, current_stream()),
            0);
  EXPECT_TRUE(at::isfinite(s.param).all().item<bool>());
  EXPECT_TRUE(at::isfinite(s.first).all().item<bool>());
}

TEST_F(CudaOptimizerRange, EmptyRangesAreNoWork) {
  EXPECT_EQ(adamw(nullptr, {}, nullptr, Dtype::kFloat, nullptr, Dtype::kFloat, {}, adamw_step(1, 1.0f),
                  nullptr, current_stream()),
            0);
  EXPECT_EQ(sgd(nullptr, {}, nullptr, Dtype::kFloat, nullptr, Dtype::kFloat, {}, sgd_step(1, 1.0f), nullptr,
                current_stream()),
            0);
}

double squares_of(const at::Tensor& values) {
  const auto options = at::TensorOptions().dtype(at::kDouble).device(at::kCUDA);
  const at::Tensor out = at::full({1}, kSentinel, options);
  const at::Tensor scratch = guarded({kSquaresScratch}, at::kDouble, 0);
  EXPECT_EQ(sum_of_squares(out.data_ptr<double>(), scratch.data_ptr<double>(), values.data_ptr(),
                           Dtype::kFloat, values.numel(), current_stream()),
            0);
  EXPECT_TRUE(guards_intact(scratch));
  return out.item<double>();
}

TEST_F(CudaOptimizerRange, SumOfSquaresIsExactToDoubleAndTheSameAtAnyAlignment) {
  at::manual_seed(4);
  for (const int64_t count : {0, 1, 3, 4, 5, 1000, 4097, 1048579, 20000003}) {
    at::Tensor values = guarded_noise({count}, at::kFloat, 0);
    if (count > 3) values[3].fill_(3e4f);
    const double exact = values.to(at::kDouble).square().sum().item<double>();
    const double sum = squares_of(values);
    EXPECT_NEAR(sum, exact, 1e-12 * exact) << count;
    for (const int64_t shift : {0, 1, 2, 3}) EXPECT_EQ(squares_of(guarded_copy(values, shift)), sum) << count;
  }
}

TEST_F(CudaOptimizerRange, LowPrecisionGradientsAreTakenAsTheyAre) {
  at::manual_seed(5);
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const State start = State::random(4099);
    const State wide = start.placed(kAligned, type), low = start.placed(kAligned, type);
    const at::Tensor rounded = wide.grad.to(type);
    wide.grad.copy_(rounded);
    for (int t = 1; t <= kSteps; ++t) {
      ASSERT_EQ(
          adamw(floats(wide.param), wide.moments(), floats(wide.grad), Dtype::kFloat, wide.copy.data_ptr(),
                dtype_of(type), one_part(wide.count()), adamw_step(t, kOnHost), nullptr, current_stream()),
          0);
      ASSERT_EQ(
          adamw(floats(low.param), low.moments(), rounded.data_ptr(), dtype_of(type), low.copy.data_ptr(),
                dtype_of(type), one_part(low.count()), adamw_step(t, kOnHost), nullptr, current_stream()),
          0);
    }
    EXPECT_TRUE(at::equal(wide.param, low.param));
    EXPECT_TRUE(at::equal(wide.copy, low.copy));
    const at::Tensor sums = at::zeros({2}, at::TensorOptions(at::kCUDA).dtype(at::kDouble));
    const at::Tensor scratch = at::empty({kSquaresScratch}, sums.options());
    ASSERT_EQ(sum_of_squares(sums.data_ptr<double>(), scratch.data_ptr<double>(), wide.grad.data_ptr(),
                             Dtype::kFloat, low.count(), current_stream()),
              0);
    ASSERT_EQ(sum_of_squares(sums.data_ptr<double>() + 1, scratch.data_ptr<double>(), rounded.data_ptr(),
                             dtype_of(type), low.count(), current_stream()),
              0);
    EXPECT_EQ(sums[0].item<double>(), sums[1].item<double>());
  }
}

}  // namespace
}  // namespace trireme::kernels::cuda
