// CPU kernels: accuracy of the scalar functions, the optimizer updates against their formulas in double, sums
// that do not depend on the number of threads.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <gtest/gtest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <system_error>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/kernels/matmul.h"
#include "trireme/kernels/norm.h"
#include "trireme/kernels/optimizer.h"
#include "trireme/kernels/pinned_memory.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/kernels/scalar_math.h"
#include "trireme/kernels/store.h"

namespace trireme::kernels {
namespace {

std::vector<float> noise(size_t count, uint64_t seed) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = static_cast<float>(static_cast<double>(mix64(seed, i) >> 11) * 0x1.0p-53 * 2.0 - 1.0);
  }
  return values;
}

TEST(ScalarMath, ExpIsWithin2e7OfLibm) {
  for (double x = -87.0; x < 88.0; x += 0.00137) {
    const double exact = std::exp(static_cast<double>(static_cast<float>(x)));
    EXPECT_NEAR(exp_approx(static_cast<float>(x)) / exact, 1.0, 2e-7) << x;
  }
  EXPECT_NEAR(exp_approx(-1000.0f), 0.0f, 1e-37f);
  EXPECT_TRUE(std::isfinite(exp_approx(1000.0f)));
}

TEST(ScalarMath, SigmoidAndTanhSaturate) {
  for (double x = -20.0; x < 20.0; x += 0.0071) {
    EXPECT_NEAR(sigmoid(static_cast<float>(x)), 1.0 / (1.0 + std::exp(-x)), 2e-7) << x;
    EXPECT_NEAR(tanh_approx(static_cast<float>(x)), std::tanh(x), 3e-7) << x;
  }
  EXPECT_FLOAT_EQ(tanh_approx(1000.0f), 1.0f);
  EXPECT_FLOAT_EQ(tanh_approx(-1000.0f), -1.0f);
}

/// Every 251st bit pattern: finite numbers of all sizes, ties, infinities, NaN.
TEST(Store, RoundsToBf16AsTorchDoes) {
  for (uint64_t bits = 0; bits <= 0xffffffffU; bits += 251) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    c10::BFloat16 stored;
    store(stored, value);
    ASSERT_EQ(stored.x, c10::BFloat16(value).x) << value;
  }
  for (const uint32_t bits : {0x3f808000U, 0x3f818000U, 0x7f7fffffU, 0x7f800000U, 0xff800000U, 0x7fc00001U}) {
    c10::BFloat16 stored;
    store(stored, std::bit_cast<float>(bits));
    EXPECT_EQ(stored.x, c10::BFloat16(std::bit_cast<float>(bits)).x) << bits;
  }
}

#ifdef __x86_64__
TEST(CpuMultipliesBf16, WhereTheSystemListsTheInstructions) {
  const std::string listed = read_file("/proc/cpuinfo");
  const bool has =
      listed.find(" avx512_bf16") != std::string::npos || listed.find(" amx_bf16") != std::string::npos;
  EXPECT_EQ(cpu_multiplies_bf16(), has);
}
#endif

TEST(AdamW, FollowsTheFormulaInDouble) {
  constexpr size_t count = 1003;
  std::vector<float> param = noise(count, 1), m(count, 0.0f), v(count, 0.0f);
  std::vector<double> exact(param.begin(), param.end()), exact_m(count, 0.0), exact_v(count, 0.0);
  std::vector<c10::BFloat16> copy(count);
  const double lr = 1e-2, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, decay = 0.1, scale = 0.25;
  for (int t = 1; t <= 5; ++t) {
    const std::vector<float> grad = noise(count, 10 + static_cast<uint64_t>(t));
    // Two parts with the same settings are one.
    const auto rate = static_cast<float>(lr), weight_decay = static_cast<float>(decay);
    const UpdatePart parts[] = {{0, 500, rate, weight_decay}, {500, count, rate, weight_decay}};
    adamw(param.data(), {.values = {m.data(), v.data()}}, grad.data(), copy.data(), parts,
          {static_cast<float>(beta1), static_cast<float>(beta2), static_cast<float>(eps),
           static_cast<float>(1 - std::pow(beta1, t)), static_cast<float>(1 - std::pow(beta2, t)),
           static_cast<float>(scale)});
    for (size_t i = 0; i < count; ++i) {
      const double g = scale * grad[i];
      exact_m[i] = beta1 * exact_m[i] + (1 - beta1) * g;
      exact_v[i] = beta2 * exact_v[i] + (1 - beta2) * g * g;
      const double mean = exact_m[i] / (1 - std::pow(beta1, t)),
                   square = exact_v[i] / (1 - std::pow(beta2, t));
      exact[i] = exact[i] * (1 - lr * decay) - lr * mean / (std::sqrt(square) + eps);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    EXPECT_NEAR(param[i], exact[i], 5e-6) << i;
    EXPECT_EQ(static_cast<float>(copy[i]), static_cast<float>(c10::BFloat16(param[i])));
  }
}

TEST(Sgd, FollowsTheFormulaInDoubleInParts) {
  std::vector<float> param = noise(64, 1),
                     buffer(64, 7.0f);  // what the buffer held before the first step is ignored
  std::vector<double> exact(param.begin(), param.end()), exact_buffer(64, 0.0);
  const UpdatePart parts[] = {{0, 13, 0.1f, 0.01f}, {20, 64, 0.05f, 0.0f}};
  for (int t = 0; t < 4; ++t) {
    const std::vector<float> grad = noise(64, 20 + static_cast<uint64_t>(t));
    sgd(param.data(), {.values = {buffer.data()}}, grad.data(), nullptr, parts, {0.9f, 0.5f, t == 0});
    for (const UpdatePart& part : parts) {
      for (auto i = static_cast<size_t>(part.begin); i < static_cast<size_t>(part.end); ++i) {
        exact_buffer[i] = 0.9 * exact_buffer[i] + 0.5 * grad[i] + double{part.weight_decay} * exact[i];
        exact[i] -= double{part.lr} * exact_buffer[i];
      }
    }
  }
  for (size_t i = 13; i < 20; ++i) EXPECT_EQ(buffer[i], 7.0f) << "of no part";
  for (size_t i = 0; i < 64; ++i) EXPECT_NEAR(param[i], exact[i], 2e-6);
}

TEST(SumOfSquares, IsTheSameForAnyNumberOfThreads) {
  const std::vector<float> values = noise(100003, 3);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const double one = sum_of_squares(values.data(), static_cast<int64_t>(values.size()));
  at::set_num_threads(3);
  const double three = sum_of_squares(values.data(), static_cast<int64_t>(values.size()));
  at::set_num_threads(before);
  long double exact = 0.0L;
  for (const float value : values) exact += static_cast<long double>(value) * static_cast<long double>(value);
  EXPECT_EQ(one, three);
  EXPECT_NEAR(one, static_cast<double>(exact), 1e-9 * one);
}

TEST(Norms, ParameterGradientsAreTheSameForAnyNumberOfThreads) {
  const int64_t rows = 1000, width = 33;
  const std::vector<float> x = noise(static_cast<size_t>(rows * width), 4), dy = noise(x.size(), 5);
  const std::vector<float> weight = noise(static_cast<size_t>(width), 6);
  const auto gradient = [&](int threads) {
    at::set_num_threads(threads);
    std::vector<float> y(x.size()), dx(x.size()), rstd(static_cast<size_t>(rows)),
        dw(static_cast<size_t>(width), 0.0f);
    rms_norm_forward(y.data(), rstd.data(), x.data(), weight.data(), rows, width, 1e-5f);
    rms_norm_backward(dx.data(), dw.data(), dy.data(), x.data(), weight.data(), rstd.data(), rows, width);
    return dw;
  };
  const int before = at::get_num_threads();
  const auto one = gradient(1);
  const auto four = gradient(4);
  at::set_num_threads(before);
  EXPECT_EQ(one, four);
}

int64_t address_space() {
  std::ifstream statm("/proc/self/statm");
  int64_t pages = 0;
  statm >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

/// Address space for the memory is there, but not for the stack of a thread. Ends with 0 where nothing is
/// left of it.
[[noreturn]] void take_without_threads() {
  constexpr int64_t kBytes = int64_t{64} << 20, kTooFewForAStack = int64_t{1} << 20;
  const int64_t before = address_space();
  rlimit limit{};
  ::getrlimit(RLIMIT_AS, &limit);
  limit.rlim_cur = static_cast<rlim_t>(before + kBytes + kTooFewForAStack);
  ::setrlimit(RLIMIT_AS, &limit);
  try {
    const PinnedMemory memory(kBytes);
  } catch (const std::system_error&) {
    std::_Exit(address_space() - before < kBytes / 2 ? 0 : 1);
  }
  std::_Exit(2);
}

TEST(PinnedMemory, IsGivenBackWhereNoThreadCanTouchIt) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers take address space of their own";
#endif
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(take_without_threads(), testing::ExitedWithCode(0), "");
}

TEST(Repeatable, TellsTorchWhileTheLastOneLivesAndGivesItsSettingsBack) {
  at::Context& context = at::globalContext();
  context.setBenchmarkCuDNN(true);
  EXPECT_FALSE(must_repeat());
  {
    const Repeatable off(false);
    EXPECT_FALSE(must_repeat());
    auto first = std::make_unique<Repeatable>(true), second = std::make_unique<Repeatable>(true);
    EXPECT_TRUE(must_repeat());
    EXPECT_TRUE(context.deterministicCuDNN());
    EXPECT_FALSE(context.benchmarkCuDNN());
    EXPECT_FALSE(context.deterministicFillUninitializedMemory()) << "filling memory costs time";
    EXPECT_THROW(at::Context::alertNotDeterministic("an operation"), c10::Error);
    first.reset();
    EXPECT_TRUE(must_repeat()) << "the other one lives";
    second.reset();
  }
  EXPECT_FALSE(must_repeat());
  EXPECT_FALSE(context.deterministicCuDNN());
  EXPECT_TRUE(context.benchmarkCuDNN());
  EXPECT_TRUE(context.deterministicFillUninitializedMemory());
  context.setBenchmarkCuDNN(false);
  context.setDeterministicAlgorithms(true, /*warn_only=*/true);
  EXPECT_FALSE(must_repeat()) << "a warning is no demand";
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  EXPECT_TRUE(must_repeat());
  context.setDeterministicAlgorithms(false, false);
}

}  // namespace
}  // namespace trireme::kernels
