// Products of our own on a CPU, against double: every way in which operands lie, sizes beside tiles and
// blocks.
#include "trireme/kernels/cpu_matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "tests/support/relative_error.h"
#include "trireme/kernels/matmul.h"

namespace trireme::kernels {
namespace {

struct Shape {
  int64_t m, n, k;
};

/// (rows, columns), which lies transposed, or with other numbers between its rows.
at::Tensor matrix(int64_t rows, int64_t columns, bool transposed) {
  return transposed ? at::randn({columns, rows + 3}).narrow(1, 0, rows).t()
                    : at::randn({rows, columns + 5}).narrow(1, 0, columns);
}

MatrixView view_of(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), tensor.stride(0), tensor.stride(1)};
}

enum class From { kNothing, kRow, kMatrix, kItself };

at::Tensor multiplied(const at::Tensor& a, const at::Tensor& b, From from, const at::Tensor& start) {
  at::Tensor out = from == From::kItself ? start.clone() : at::full({a.size(0), b.size(1)}, NAN);
  const float* begin = from == From::kNothing  ? nullptr
                       : from == From::kItself ? out.const_data_ptr<float>()
                                               : start.const_data_ptr<float>();
  multiply(out.mutable_data_ptr<float>(), view_of(a), view_of(b), a.size(0), b.size(1), a.size(1), begin,
           from == From::kRow ? 0 : b.size(1));
  return out;
}

TEST(CpuMatmul, IsTheProductWhereverOperandsLie) {
  at::manual_seed(7);
  for (const auto& [m, n, k] : {Shape{1, 1, 1},
                                {12, 32, 8},
                                {13, 33, 9},
                                {5, 200, 600},
                                {257, 47, 1100},
                                {100, 900, 300},
                                {11, 31, 513},
                                {40, 3, 2}}) {
    for (const bool left : {false, true}) {
      for (const bool right : {false, true}) {
        const at::Tensor a = matrix(m, k, left), b = matrix(k, n, right);
        const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
        for (const From from : {From::kNothing, From::kRow, From::kMatrix, From::kItself}) {
          const at::Tensor start = at::randn({from == From::kRow ? 1 : m, n}),
                           wanted = from == From::kNothing ? exact : exact + start;
          EXPECT_LE(test::relative_error(multiplied(a, b, from, start), wanted), 1e-6)
              << fmt::format("{} x {} x {}, {} {}, start {}", m, n, k, left, right, static_cast<int>(from));
        }
      }
    }
  }
}

/// Neither the number of threads nor the rows beside it change what a row becomes.
TEST(CpuMatmul, AnElementIsSummedInOneOrder) {
  at::manual_seed(8);
  const int threads = at::get_num_threads();
  for (const bool left : {false, true}) {
    const at::Tensor a = matrix(301, 700, left), b = matrix(700, 530, !left);
    at::set_num_threads(1);
    const at::Tensor one = multiplied(a, b, From::kNothing, {});
    for (const int more : {2, 3, 7}) {
      at::set_num_threads(more);
      EXPECT_TRUE(at::equal(multiplied(a, b, From::kNothing, {}), one)) << more << " threads";
    }
    at::set_num_threads(1);
    for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 1}, {7, 40}, {300, 1}}) {
      EXPECT_TRUE(at::equal(multiplied(a.narrow(0, first, count), b, From::kNothing, {}),
                            one.narrow(0, first, count)))
          << first << ", " << count;
    }
  }
  at::set_num_threads(threads);
}

/// Infinities and NaN of other columns stay there.
TEST(CpuMatmul, ColumnsDoNotTouchEachOther) {
  const at::Tensor a = at::ones({14, 6});
  at::Tensor b = at::ones({6, 40});
  b.select(1, 39).fill_(NAN);
  b.select(1, 5).fill_(std::numeric_limits<float>::infinity());
  const at::Tensor out = multiplied(a, b, From::kNothing, {});
  EXPECT_TRUE(out.select(1, 39).isnan().all().item<bool>());
  EXPECT_TRUE(out.select(1, 5).isinf().all().item<bool>());
  EXPECT_EQ(out.isfinite().sum().item<int64_t>(), 14 * 38);
}

/// As layers call it: biases, what is added, and both.
TEST(CpuMatmul, AddsBiasAndAddend) {
  at::manual_seed(9);
  const at::Tensor a = at::randn({30, 20}), b = at::randn({50, 20}).t(), bias = at::randn({50}),
                   addend = at::randn({30, 50});
  const at::Tensor exact = a.to(at::kDouble).mm(b.to(at::kDouble));
  EXPECT_LE(test::relative_error(product(a, b), exact), 1e-6);
  EXPECT_LE(test::relative_error(product(a, b, bias), exact + bias), 1e-6);
  EXPECT_LE(test::relative_error(product(a, b, {}, addend), exact + addend), 1e-6);
  EXPECT_LE(test::relative_error(product(a, b, bias, addend), exact + bias + addend), 1e-6);
  at::Tensor sum = addend.clone();
  matmul(sum, a, b, bias, sum);
  EXPECT_LE(test::relative_error(sum, exact + bias + addend), 1e-6);
}

}  // namespace
}  // namespace trireme::kernels
