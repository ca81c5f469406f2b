// SwiGLU and GELU on the GPU against ATen in double.
#include "tests/kernels/cuda_support.h"

namespace trireme::kernels::cuda {
namespace {

constexpr double kAbsolute = 4e-6;  // where terms of a derivative cancel, times the size of the inputs

class Swiglu : public CudaDtypeTest {};
class Gelu : public CudaDtypeTest {};
TRIREME_FOR_EACH_DTYPE(Swiglu);
TRIREME_FOR_EACH_DTYPE(Gelu);

struct Matrix {
  int64_t rows, width;
  std::string name() const { return std::to_string(rows) + "x" + std::to_string(width); }
};
// One element, odd widths, one pack, ragged last tiles, and several tiles per row.
const Matrix kMatrices[] = {{1, 1}, {3, 7}, {5, 8}, {1, 64}, {130, 264}, {7, 1001}, {3, 4104}, {4, 14336}};

at::Tensor exact_swiglu(const at::Tensor& gate_up) {
  const auto halves = in_double(gate_up).chunk(2, 1);
  return at::silu(halves[0]) * halves[1];
}

at::Tensor exact_swiglu_gradient(const at::Tensor& dy, const at::Tensor& gate_up) {
  const auto halves = in_double(gate_up).chunk(2, 1);
  const at::Tensor d = in_double(dy);
  return at::cat({at::silu_backward(d * halves[1], halves[0]), d * at::silu(halves[0])}, 1);
}

at::Tensor run_swiglu(const at::Tensor& gate_up) {
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  at::Tensor y = at::full({rows, width}, NAN, gate_up.options());
  EXPECT_EQ(0, swiglu_forward(y.data_ptr(), gate_up.data_ptr(), rows, width, dtype_of(y.scalar_type()),
                              current_stream()));
  return y;
}

void run_swiglu_backward(const at::Tensor& d_gate_up, const at::Tensor& dy, const at::Tensor& gate_up,
                         const at::Tensor& y = {}) {
  EXPECT_EQ(0, swiglu_backward(d_gate_up.data_ptr(), dy.data_ptr(), gate_up.data_ptr(), dy.size(0),
                               dy.size(1), dtype_of(dy.scalar_type()), current_stream(), nullptr,
                               y.defined() ? y.data_ptr() : nullptr));
}

TEST_P(Swiglu, ForwardFollowsTheFormula) {
  for (const Matrix& matrix : kMatrices) {
    const at::Tensor gate_up = noise({matrix.rows, 2 * matrix.width}, type(), 1, 3.0);
    const at::Tensor exact = exact_swiglu(gate_up);
    expect_close(run_swiglu(gate_up), exact, relative(), kAbsolute, matrix.name());
    expect_close(run_swiglu(unaligned(gate_up)), exact, relative(), kAbsolute, matrix.name() + " unaligned");
  }
}

TEST_P(Swiglu, BackwardFollowsTheFormulaAlsoInPlace) {
  for (const Matrix& matrix : kMatrices) {
    const at::Tensor gate_up = noise({matrix.rows, 2 * matrix.width}, type(), 2, 3.0);
    const at::Tensor dy = noise({matrix.rows, matrix.width}, type(), 3);
    const at::Tensor exact = exact_swiglu_gradient(dy, gate_up);
    const at::Tensor apart = at::full_like(gate_up, NAN);
    run_swiglu_backward(apart, dy, gate_up);
    expect_close(apart, exact, relative(), 10 * kAbsolute, matrix.name());
    const at::Tensor scalar = unaligned(gate_up);
    run_swiglu_backward(scalar, dy, scalar);
    expect_close(scalar, exact, relative(), 10 * kAbsolute, matrix.name() + " unaligned");
    run_swiglu_backward(gate_up, dy, gate_up);
    EXPECT_TRUE(at::equal(gate_up, apart)) << matrix.name();
  }
}

TEST_P(Swiglu, BackwardGivesTheBitsOfTheForwardAgain) {
  for (const Matrix& matrix : kMatrices) {
    const at::Tensor gate_up = noise({matrix.rows, 2 * matrix.width}, type(), 2, 3.0);
    const at::Tensor dy = noise({matrix.rows, matrix.width}, type(), 3);
    const at::Tensor alone = at::full_like(gate_up, NAN), beside = at::full_like(gate_up, NAN);
    at::Tensor y = at::full_like(dy, NAN), elsewhere = unaligned(y);
    run_swiglu_backward(alone, dy, gate_up);
    run_swiglu_backward(beside, dy, gate_up, y);
    EXPECT_TRUE(at::equal(beside, alone)) << matrix.name();
    EXPECT_TRUE(at::equal(y, run_swiglu(gate_up))) << matrix.name();
    run_swiglu_backward(beside, dy, gate_up, elsewhere);
    EXPECT_TRUE(at::equal(elsewhere, y)) << matrix.name() << " unaligned";
  }
}

TEST_P(Swiglu, LargeGatesSaturate) {
  const at::Tensor gate_up = at::tensor({-1e4, 1e4, 2.0, 2.0}, at::kDouble).view({1, 4}).to(type()).cuda();
  const at::Tensor dy = at::ones({1, 2}, gate_up.options());
  const at::Tensor y = in_double(run_swiglu(gate_up));
  EXPECT_EQ(y[0][0].item<double>(), 0.0);
  EXPECT_EQ(y[0][1].item<double>(), 2.0 * in_double(gate_up)[0][1].item<double>());
  run_swiglu_backward(gate_up, dy, gate_up);
  const at::Tensor gradient = in_double(gate_up);
  EXPECT_EQ(gradient[0][0].item<double>(), 0.0);
  EXPECT_EQ(gradient[0][1].item<double>(), 2.0);
}

at::Tensor run_gelu(const at::Tensor& x) {
  at::Tensor y = at::full_like(x, NAN);
  EXPECT_EQ(0,
            gelu_forward(y.data_ptr(), x.data_ptr(), x.numel(), dtype_of(x.scalar_type()), current_stream()));
  return y;
}

void run_gelu_backward(const at::Tensor& dx, const at::Tensor& dy, const at::Tensor& x,
                       const at::Tensor& y = {}) {
  EXPECT_EQ(0, gelu_backward(dx.data_ptr(), dy.data_ptr(), x.data_ptr(), x.numel(), dtype_of(x.scalar_type()),
                             current_stream(), nullptr, y.defined() ? y.data_ptr() : nullptr));
}

// Fewer rows than walkers and many more, ragged widths, and blocks of columns that end within a warp.
const Matrix kMatricesOfRows[] = {{1, 1},       {1, 64},      {3, 7},    {130, 264},
                                  {1000, 1001}, {5003, 3072}, {9, 14336}};

const int64_t kCounts[] = {1, 7, 8, 1000, 1001, 8192, 8195, 100003};

TEST_P(Gelu, ForwardFollowsTheFormula) {
  for (const int64_t count : kCounts) {
    const at::Tensor x = noise({count}, type(), 4, 3.0);
    const at::Tensor exact = at::gelu(in_double(x), "tanh");
    expect_close(run_gelu(x), exact, relative(), kAbsolute, std::to_string(count));
    expect_close(run_gelu(unaligned(x)), exact, relative(), kAbsolute, std::to_string(count) + " unaligned");
  }
}

TEST_P(Gelu, BackwardFollowsTheFormulaAlsoInPlace) {
  for (const int64_t count : kCounts) {
    const at::Tensor x = noise({count}, type(), 5, 3.0), dy = noise({count}, type(), 6);
    const at::Tensor exact = at::gelu_backward(in_double(dy), in_double(x), "tanh");
    const at::Tensor apart = at::full_like(x, NAN);
    run_gelu_backward(apart, dy, x);
    expect_close(apart, exact, relative(), kAbsolute, std::to_string(count));
    const at::Tensor scalar = unaligned(dy);
    run_gelu_backward(scalar, scalar, x);
    expect_close(scalar, exact, relative(), kAbsolute, std::to_string(count) + " unaligned");
    const at::Tensor over_dy = dy.clone(), over_x = x.clone();
    run_gelu_backward(over_dy, over_dy, x);
    run_gelu_backward(over_x, dy, over_x);
    EXPECT_TRUE(at::equal(over_dy, apart)) << count;
    EXPECT_TRUE(at::equal(over_x, apart)) << count;
  }
}

TEST_P(Gelu, BackwardGivesTheBitsOfTheForwardAgain) {
  for (const int64_t count : kCounts) {
    const at::Tensor x = noise({count}, type(), 5, 3.0), dy = noise({count}, type(), 6);
    const at::Tensor alone = at::full_like(x, NAN), beside = at::full_like(x, NAN);
    const at::Tensor y = at::full_like(x, NAN);
    run_gelu_backward(alone, dy, x);
    run_gelu_backward(beside, dy, x, y);
    EXPECT_TRUE(at::equal(beside, alone)) << count;
    EXPECT_TRUE(at::equal(y, run_gelu(x))) << count;
  }
}

TEST_P(Gelu, ColumnSumsOfTheGradientAreThoseOfWhatIsStoredAndChangeNoBit) {
  for (const Matrix& matrix : kMatricesOfRows) {
    const at::Tensor plain = noise({matrix.rows, matrix.width}, type(), 5, 3.0);
    const at::Tensor dy = noise({matrix.rows, matrix.width}, type(), 6);
    for (const at::Tensor& x : {plain, unaligned(plain)}) {
      const at::Tensor alone = at::full_like(x, NAN), wanted_y = at::full_like(x, NAN);
      run_gelu_backward(alone, dy, x, wanted_y);
      const auto run = [&](const at::Tensor& dx, const at::Tensor& y) {
        const auto fp32 = x.options().dtype(at::kFloat);
        at::Tensor sums = at::full({matrix.width}, NAN, fp32), amax = at::zeros({1}, fp32);
        at::Tensor scratch = at::full({column_scratch(matrix.width)}, NAN, fp32);
        EXPECT_EQ(0, gelu_backward_with_sums(dx.data_ptr(), sums.data_ptr<float>(), scratch.data_ptr<float>(),
                                             dy.data_ptr(), x.data_ptr(), matrix.rows, matrix.width,
                                             dtype_of(x.scalar_type()), current_stream(),
                                             amax.data_ptr<float>(), y.defined() ? y.data_ptr() : nullptr));
        EXPECT_EQ(amax.item<float>(), alone.abs().max().item<float>()) << matrix.name();
        return sums;
      };
      const at::Tensor dx = at::full_like(x, NAN), y = at::full_like(x, NAN);
      const at::Tensor sums = run(dx, y);
      EXPECT_TRUE(at::equal(dx, alone)) << matrix.name();
      EXPECT_TRUE(at::equal(y, wanted_y)) << matrix.name();
      const at::Tensor exact = in_double(alone);
      EXPECT_TRUE(
          ((in_double(sums) - exact.sum(0)).abs() <= 4e-6 * exact.abs().sum(0) + 1e-30).all().item<bool>())
          << matrix.name();
      EXPECT_TRUE(at::equal(run(at::empty_like(x), {}), sums)) << matrix.name() << " run again";
    }
  }
}

TEST_P(Gelu, LargeInputsSaturate) {
  const at::Tensor x = at::tensor({-1e4, 1e4}, at::kDouble).to(type()).cuda();
  EXPECT_TRUE(at::equal(in_double(run_gelu(x)), in_double(x).clamp_min(0.0)));
  const at::Tensor dx = at::full_like(x, NAN);
  run_gelu_backward(dx, at::ones_like(x), x);
  EXPECT_TRUE(at::equal(in_double(dx), at::tensor({0.0, 1.0}, at::kDouble)));
}

TEST_P(Gelu, NanComesThrough) {
  EXPECT_TRUE(run_gelu(at::full({9}, NAN, at::TensorOptions().dtype(type()).device(at::kCUDA)))
                  .isnan()
                  .all()
                  .item<bool>());
}

using Activations = CudaTest;

TEST_F(Activations, NothingToDoIsNoError) {
  EXPECT_EQ(0, swiglu_forward(nullptr, nullptr, 0, 8, Dtype::kFloat, current_stream()));
  EXPECT_EQ(0, swiglu_backward(nullptr, nullptr, nullptr, 0, 8, Dtype::kFloat, current_stream()));
  EXPECT_EQ(0, gelu_forward(nullptr, nullptr, 0, Dtype::kFloat, current_stream()));
  EXPECT_EQ(0, gelu_backward(nullptr, nullptr, nullptr, 0, Dtype::kFloat, current_stream()));
}

TEST_F(Activations, MoreThanTwoToThe31Elements) {
  const int64_t count = (int64_t{1} << 31) + 11;
  if (!has_memory_for(4 * count)) GTEST_SKIP() << "needs 11 GB of GPU memory";
  at::Tensor x = at::zeros({count}, at::TensorOptions().dtype(at::kHalf).device(at::kCUDA));
  const at::Tensor end = noise({19}, at::kHalf, 7);
  x.narrow(0, count - 19, 19).copy_(end);
  const at::Tensor y = run_gelu(x);
  EXPECT_TRUE(at::equal(y.narrow(0, count - 19, 19), run_gelu(end)));
  EXPECT_EQ(y.narrow(0, 0, count - 19).count_nonzero().item<int64_t>(), 0);
}

}  // namespace
}  // namespace trireme::kernels::cuda
