// Products by cuBLASLt against products in double, and the law that trying algorithms changes no bits.
#include <fmt/format.h>

#include "tests/kernels/cuda_support.h"
#include "trireme/kernels/matmul.h"

namespace trireme::kernels {
namespace {

using cuda::in_double;
using cuda::noise;
using cuda::unaligned;

class Matmul : public cuda::CudaDtypeTest {};
using cuda::dtype_name;
TRIREME_FOR_EACH_DTYPE(Matmul);

/// (rows, columns), lying transposed in memory when asked for.
at::Tensor matrix(int64_t rows, int64_t columns, bool transposed, at::ScalarType type, uint64_t seed) {
  return transposed ? noise({columns, rows}, type, seed).t() : noise({rows, columns}, type, seed);
}

/// Whether every element is as close as roundings of the terms of `sum` to the dtype and fp32 sums of k
/// allow.
void expect_sum(const at::Tensor& actual, const std::vector<at::Tensor>& terms, double relative, int64_t k,
                const std::string& what) {
  at::Tensor exact = at::zeros_like(terms.front()), magnitude = exact.clone();
  for (const at::Tensor& term : terms) {
    exact += term;
    magnitude += term.abs();
  }
  const at::Tensor bound = 2 * relative * magnitude + 4e-6 * static_cast<double>(k);
  const at::Tensor excess = (in_double(actual) - exact).abs() - bound;
  EXPECT_LE(excess.max().item<double>(), 0.0) << what;
}

TEST_P(Matmul, EqualsTheProductInDouble) {
  struct Sizes {
    int64_t m, n, k;
  };
  for (const auto& [m, n, k] : {Sizes{1, 1, 1}, Sizes{5, 7, 3}, Sizes{64, 192, 33}, Sizes{257, 128, 512}}) {
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        const at::Tensor a = matrix(m, k, a_transposed, type(), 1), b = matrix(k, n, b_transposed, type(), 2);
        const at::Tensor bias = noise({n}, type(), 3), addend = noise({m, n}, type(), 4);
        const at::Tensor exact = in_double(a).mm(in_double(b)), rows = in_double(bias).expand({m, n});
        const std::string what = fmt::format("({}, {}) @ ({}, {})", m, k, k, n);
        cuda::expect_close(product(a, b), exact, relative(), 4e-6 * static_cast<double>(k), what);
        expect_sum(product(a, b, bias), {exact, rows}, relative(), k, what + " + bias");
        expect_sum(product(a, b, bias, addend), {exact, rows, in_double(addend)}, relative(), k,
                   what + " + bias + addend");
        at::Tensor sum = addend.clone();
        matmul(sum, a, b, {}, sum);
        expect_sum(sum, {exact, in_double(addend)}, relative(), k, what + " in place");
      }
    }
  }
}

TEST_P(Matmul, AddsToFp32WithoutRoundingToItsOwnDtype) {
  for (const bool transposed : {false, true}) {
    const at::Tensor a = matrix(320, 96, transposed, type(), 1), b = matrix(96, 200, !transposed, type(), 2);
    const at::Tensor exact = in_double(a).mm(in_double(b)), start = noise({320, 200}, at::kFloat, 3);
    at::Tensor sum = start.clone(), fresh = at::empty_like(start);
    matmul(sum, a, b, {}, sum);
    cuda::expect_close(sum, exact + in_double(start), 1e-6, 4e-6 * 96, "in place");
    matmul(fresh, a, b, {}, start);
    cuda::expect_close(fresh, exact + in_double(start), 1e-6, 4e-6 * 96, "to other memory");
    matmul(fresh, a, b);
    cuda::expect_close(fresh, exact, 1e-6, 4e-6 * 96, "alone");
  }
}

TEST_P(Matmul, TakesViewsAndUnalignedMemory) {
  const at::Tensor wide = noise({96, 80}, type(), 1);
  const at::Tensor a = wide.narrow(1, 8, 40), b = unaligned(noise({40, 24}, type(), 2));
  const at::Tensor exact = in_double(a).mm(in_double(b));
  cuda::expect_close(product(a, b), exact, relative(), 2e-4, "a view of columns");
  cuda::expect_close(product(a.slice(1, 0, 40, 2), b.slice(0, 0, 40, 2)),
                     in_double(a.slice(1, 0, 40, 2)).mm(in_double(b.slice(0, 0, 40, 2))), relative(), 2e-4,
                     "elements apart");
  EXPECT_EQ(product(a.narrow(0, 0, 0), b).size(0), 0);
}

TEST_P(Matmul, TryingAlgorithmsChangesNoBits) {
  const at::Tensor x = noise({4096, 768}, type(), 1), weight = noise({768, 2304}, type(), 2);
  const at::Tensor dy = noise({4096, 2304}, type(), 3), bias = noise({2304}, type(), 4);
  const at::Tensor start = noise({768, 2304}, type(), 5), residual = noise({4096, 768}, type(), 6);
  const auto all = [&] {
    at::Tensor gradient = start.clone();
    matmul(gradient, x.t(), dy, {}, gradient);
    at::Tensor sum = start.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    matmul(sum, x.t(), dy, {}, sum);
    return std::vector<at::Tensor>{product(x, weight, bias), product(dy, weight.t()),
                                   product(dy, weight.t(), {}, residual), gradient, sum};
  };
  const auto all_with = [&](bool tries) {
    const MatmulTuning tuning(tries);
    return all();
  };
  const std::vector<at::Tensor> plain = all_with(false), tuned = all_with(true), again = all_with(true);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(tuned[i].equal(plain[i])) << i;
    EXPECT_TRUE(tuned[i].equal(again[i])) << i;
  }
}

TEST_P(Matmul, AProductOfZerosSettlesNothing) {
  const at::Tensor zeros = at::zeros({1024, 512}, at::TensorOptions(at::kCUDA).dtype(type()));
  const at::Tensor weight = noise({512, 640}, type(), 1);
  EXPECT_EQ(product(zeros, weight).count_nonzero().item<int64_t>(), 0);
  const at::Tensor x = noise({1024, 512}, type(), 2);
  cuda::expect_close(product(x, weight), in_double(x).mm(in_double(weight)), relative(), 2e-3, "after zeros");
}

}  // namespace
}  // namespace trireme::kernels
