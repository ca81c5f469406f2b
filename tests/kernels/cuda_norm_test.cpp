// Norms and column sums against their formulas in double, for every path: rows in registers, rows too wide
// for that, and pointers or widths that do not allow 16-byte accesses.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/kernels/cuda_norm_support.h"
#include "tests/kernels/cuda_support.h"
#include "trireme/kernels/cuda_kernels.h"

namespace trireme::kernels::cuda {
namespace {

constexpr float kEps = 1e-5f;
constexpr double kArithmetic = 4e-6;  // bound on the error of fp32 sums, relative to the sum of magnitudes

struct Case {
  at::ScalarType type;
  bool layer;
  int64_t rows, width;
  bool residual;  ///< with delta and d_sum
  int64_t shift;  ///< elements off a 16-byte boundary

  std::string name() const {
    return fmt::format("{} {} rows {} width {} residual {} shift {}", c10::toString(type),
                       layer ? "layer" : "rms", rows, width, residual, shift);
  }
};

void* pointer(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr() : nullptr;
}

struct Inputs {
  at::Tensor x, delta, weight, bias, dy, d_sum, dweight, dbias;

  explicit Inputs(const Case& c) {
    const auto noise = [&](at::IntArrayRef sizes) { return guarded_noise(sizes, c.type, c.shift); };
    x = noise({c.rows, c.width});
    dy = noise({c.rows, c.width});
    if (c.residual) delta = noise({c.rows, c.width});
    if (c.residual) d_sum = noise({c.rows, c.width});
    weight = noise({c.width});
    bias = noise({c.width});
    dweight = noise({c.width});
    dbias = noise({c.width});
  }
};

struct Forward {
  at::Tensor y, sum, mean, rstd;
};

Forward run_forward(const Case& c, const Inputs& in) {
  const auto sizes = in.x.sizes();
  Forward out{guarded(sizes, c.type, c.shift), guarded(sizes, c.type, c.shift),
              guarded({c.rows}, at::kFloat, 0), guarded({c.rows}, at::kFloat, 0)};
  const int error =
      c.layer ? layer_norm_forward(pointer(out.y), pointer(out.sum), floats(out.mean), floats(out.rstd),
                                   pointer(in.x), pointer(in.delta), pointer(in.weight), pointer(in.bias),
                                   c.rows, c.width, kEps, dtype_of(c.type), current_stream())
              : rms_norm_forward(pointer(out.y), pointer(out.sum), floats(out.rstd), pointer(in.x),
                                 pointer(in.delta), pointer(in.weight), c.rows, c.width, kEps,
                                 dtype_of(c.type), current_stream());
  EXPECT_EQ(error, 0) << c.name();
  return out;
}

struct Backward {
  at::Tensor dx, dweight, dbias, scratch;
};

/// Into `dx`, which may be dy or d_sum. dx_sums: as the kernel takes it, of a LayerNorm.
Backward run_backward(const Case& c, const Inputs& in, const Forward& forward, const at::Tensor& dx,
                      const at::Tensor& dx_sums = {}) {
  Backward out{dx, guarded_copy(in.dweight, c.shift), guarded_copy(in.dbias, c.shift),
               guarded({norm_scratch(c.width, !c.layer            ? 1
                                              : dx_sums.defined() ? 3
                                                                  : 2)},
                       at::kFloat, 0)};
  const at::Tensor& x = c.residual ? forward.sum : in.x;
  const int error =
      c.layer ? layer_norm_backward(pointer(out.dx), pointer(out.dweight), pointer(out.dbias),
                                    floats(out.scratch), pointer(in.dy), pointer(in.d_sum), pointer(x),
                                    pointer(in.weight), floats(forward.mean), floats(forward.rstd), c.rows,
                                    c.width, dtype_of(c.type), current_stream(), nullptr,
                                    dx_sums.defined() ? floats(dx_sums) : nullptr)
              : rms_norm_backward(pointer(out.dx), pointer(out.dweight), floats(out.scratch), pointer(in.dy),
                                  pointer(in.d_sum), pointer(x), pointer(in.weight), floats(forward.rstd),
                                  c.rows, c.width, dtype_of(c.type), current_stream());
  EXPECT_EQ(error, 0) << c.name();
  return out;
}

/// What is normalised, in double, and its statistics (rows, 1).
struct ExactNorm {
  at::Tensor x, mean, rstd, normal, weight;

  ExactNorm(const Case& c, const Inputs& in, const at::Tensor& sum) {
    x = sum.to(at::kDouble);
    mean = c.layer ? x.mean(1, true) : at::zeros({c.rows, 1}, x.options());
    rstd = ((x - mean).square().mean(1, true) + static_cast<double>(kEps)).rsqrt();
    normal = (x - mean) * rstd;
    weight = in.weight.to(at::kDouble);
  }
};

at::Tensor rounding(const Case& c, const at::Tensor& exact) {
  return relative_tolerance(c.type) * exact.abs() + 1e-7;
}

void check_forward(const Case& c, const Inputs& in, const Forward& out, const at::Tensor& sum) {
  if (c.residual) {
    EXPECT_TRUE(at::equal(out.sum, sum)) << c.name();
  } else {
    EXPECT_TRUE(out.sum.eq(kSentinel).all().item<bool>()) << c.name();
  }
  const ExactNorm exact(c, in, sum);
  const at::Tensor bias = c.layer ? in.bias.to(at::kDouble) : at::zeros({c.width}, exact.x.options());
  const at::Tensor y = exact.normal * exact.weight + bias;
  const at::Tensor magnitude = (exact.normal.abs() + exact.rstd) * exact.weight.abs() + bias.abs();
  expect_within(out.y, y, rounding(c, y) + kArithmetic * magnitude, c.name() + " y");
  const at::Tensor rstd = exact.rstd.flatten();
  expect_within(out.rstd, rstd, kArithmetic * rstd, c.name() + " rstd");
  if (c.layer) {
    expect_within(out.mean, exact.mean.flatten(), kArithmetic * exact.x.abs().mean(1), c.name() + " mean");
  }
  for (const at::Tensor& written : {out.y, out.sum, out.mean, out.rstd}) {
    EXPECT_TRUE(guards_intact(written)) << c.name();
  }
}

void check_column_gradient(const Case& c, const at::Tensor& actual, const at::Tensor& before,
                           const at::Tensor& terms, const at::Tensor& magnitudes, const std::string& what) {
  const at::Tensor start = before.to(at::kDouble);
  const at::Tensor exact = start + terms.sum(0);
  const at::Tensor allowed = rounding(c, exact) + kArithmetic * (start.abs() + magnitudes.sum(0));
  expect_within(actual, exact, allowed, c.name() + what);
}

void check_backward(const Case& c, const Inputs& in, const Backward& out, const at::Tensor& sum) {
  const ExactNorm exact(c, in, sum);
  const at::Tensor dy = in.dy.to(at::kDouble);
  const at::Tensor d_sum = c.residual ? in.d_sum.to(at::kDouble) : at::zeros({1}, dy.options());
  const at::Tensor d_normal = dy * exact.weight;
  const at::Tensor dot = d_normal * exact.normal;
  const at::Tensor mean_d = c.layer ? d_normal.mean(1, true) : at::zeros({c.rows, 1}, dy.options());
  const at::Tensor dx = exact.rstd * (d_normal - mean_d - exact.normal * dot.mean(1, true)) + d_sum;
  const at::Tensor spread = (exact.normal.abs() + exact.rstd) * dot.abs().mean(1, true);
  const at::Tensor magnitude =
      exact.rstd * (d_normal.abs() + d_normal.abs().mean(1, true) + spread) + d_sum.abs();
  expect_within(out.dx, dx, rounding(c, dx) + kArithmetic * magnitude, c.name() + " dx");

  check_column_gradient(c, out.dweight, in.dweight, dy * exact.normal,
                        dy.abs() * (exact.normal.abs() + exact.rstd), " dweight");
  if (c.layer) check_column_gradient(c, out.dbias, in.dbias, dy, dy.abs(), " dbias");
  for (const at::Tensor& written : {out.dx, out.dweight, out.dbias, out.scratch}) {
    EXPECT_TRUE(guards_intact(written)) << c.name();
  }
}

at::Tensor normalised_sum(const Case& c, const Inputs& in) {
  return c.residual ? (in.x.to(at::kFloat) + in.delta.to(at::kFloat)).to(c.type) : in.x;
}

void check(const Case& c) {
  const Inputs in(c);
  const at::Tensor sum = normalised_sum(c, in);
  const Forward forward = run_forward(c, in);
  check_forward(c, in, forward, sum);
  EXPECT_TRUE(at::equal(run_forward(c, in).y, forward.y)) << c.name() << " y, run again";

  const auto dx = [&] { return guarded(in.x.sizes(), c.type, c.shift); };
  const Backward backward = run_backward(c, in, forward, dx());
  check_backward(c, in, backward, sum);
  const Backward again = run_backward(c, in, forward, dx());
  EXPECT_TRUE(at::equal(again.dx, backward.dx)) << c.name() << " dx, run again";
  EXPECT_TRUE(at::equal(again.dweight, backward.dweight)) << c.name() << " dweight, run again";
  EXPECT_TRUE(at::equal(again.dbias, backward.dbias)) << c.name() << " dbias, run again";
}

/// Widths of every shape and both sides of its bounds, and rows below and above the walkers of the backward
/// pass.
template <typename Body>
void for_sizes(const Body& body) {
  for (const int64_t width : {1, 7, 8, 64, 100, 384, 768, 1024, 2048, 2056, 4096, 8200, 12288}) {
    for (const int64_t rows : {1, 3, 130, 1000}) body(rows, width);
  }
  for (const int64_t width : {64, 100, 384, 768, 1024, 2048}) body(5000, width);
  body(3, 32768);
}

class CudaNorm : public CudaDtypeTest {};

TEST_P(CudaNorm, RmsNormEqualsItsFormula) {
  at::manual_seed(1);
  for_sizes([&](int64_t rows, int64_t width) {
    for (const bool residual : {false, true}) {
      for (const int64_t shift : {0, 1}) check({type(), false, rows, width, residual, shift});
    }
  });
}

TEST_P(CudaNorm, LayerNormEqualsItsFormula) {
  at::manual_seed(2);
  for_sizes([&](int64_t rows, int64_t width) {
    for (const bool residual : {false, true}) {
      for (const int64_t shift : {0, 1}) check({type(), true, rows, width, residual, shift});
    }
  });
}

TEST_P(CudaNorm, TheGradientMayReplaceWhatItIsMadeOf) {
  at::manual_seed(3);
  for (const int64_t width : {100, 384, 768, 2048, 12288}) {
    for (const bool layer : {false, true}) {
      const Case c{type(), layer, 2500, width, true, 0};
      const Inputs in(c);
      const Forward forward = run_forward(c, in);
      const Backward apart = run_backward(c, in, forward, guarded(in.x.sizes(), c.type, 0));
      for (at::Tensor Inputs::*replaced : {&Inputs::dy, &Inputs::d_sum}) {
        Inputs own = in;
        own.*replaced = guarded_copy(in.*replaced, 0);
        const Backward in_place = run_backward(c, own, forward, own.*replaced);
        EXPECT_TRUE(at::equal(in_place.dx, apart.dx)) << c.name();
        EXPECT_TRUE(at::equal(in_place.dweight, apart.dweight)) << c.name();
        EXPECT_TRUE(at::equal(in_place.dbias, apart.dbias)) << c.name();
      }
    }
  }
}

TEST_P(CudaNorm, ColumnSumsOfTheGradientAreThoseOfWhatIsStoredAndChangeNoBit) {
  at::manual_seed(5);
  for_sizes([&](int64_t rows, int64_t width) {
    for (const int64_t shift : {0, 1}) {
      const Case c{type(), true, rows, width, true, shift};
      const Inputs in(c);
      const Forward forward = run_forward(c, in);
      const auto dx = [&] { return guarded(in.x.sizes(), c.type, c.shift); };
      const Backward alone = run_backward(c, in, forward, dx());
      const auto sums = [&] { return guarded({width}, at::kFloat, 0); };
      const at::Tensor first = sums(), second = sums();
      const Backward beside = run_backward(c, in, forward, dx(), first);
      run_backward(c, in, forward, dx(), second);
      EXPECT_TRUE(at::equal(beside.dx, alone.dx)) << c.name();
      EXPECT_TRUE(at::equal(beside.dweight, alone.dweight)) << c.name();
      EXPECT_TRUE(at::equal(beside.dbias, alone.dbias)) << c.name();
      EXPECT_TRUE(at::equal(second, first)) << c.name() << " run again";
      EXPECT_TRUE(guards_intact(first) && guards_intact(beside.scratch)) << c.name();
      const at::Tensor exact = alone.dx.to(at::kDouble);
      expect_within(first, exact.sum(0), kArithmetic * exact.abs().sum(0), c.name() + " sums");

      const at::Tensor total = at::zeros({width}, alone.dx.options());
      const at::Tensor scratch = guarded({column_scratch(width)}, at::kFloat, 0);
      EXPECT_EQ(add_column_sums(pointer(total), floats(scratch), pointer(alone.dx), rows, width, dtype(),
                                current_stream()),
                0);
      EXPECT_TRUE(at::equal(first.to(type()), total)) << c.name() << " in the order of add_column_sums()";
    }
  });
}

TEST_P(CudaNorm, ColumnSumsAddToTheTotal) {
  at::manual_seed(4);
  for_sizes([&](int64_t rows, int64_t width) {
    for (const int64_t shift : {0, 1}) {
      const Case c{type(), false, rows, width, false, shift};
      const at::Tensor x = guarded_noise({rows, width}, type(), shift);
      const at::Tensor before = guarded_noise({width}, type(), shift);
      const auto run = [&] {
        const at::Tensor total = guarded_copy(before, shift);
        const at::Tensor scratch = guarded({column_scratch(width)}, at::kFloat, 0);
        EXPECT_EQ(add_column_sums(pointer(total), floats(scratch), pointer(x), rows, width, dtype(),
                                  current_stream()),
                  0);
        EXPECT_TRUE(guards_intact(total) && guards_intact(scratch)) << c.name();
        return total;
      };
      const at::Tensor total = run();
      const at::Tensor exact = x.to(at::kDouble);
      check_column_gradient(c, total, before, exact, exact.abs(), " column sums");
      EXPECT_TRUE(at::equal(run(), total)) << c.name() << " run again";
    }
  });
}

TEST_P(CudaNorm, NoRowsChangeNothing) {
  for (const bool layer : {false, true}) {
    const Case c{type(), layer, 0, 64, false, 0};
    const Inputs in(c);
    const Forward forward = run_forward(c, in);
    const Backward backward = run_backward(c, in, forward, guarded({0, 64}, type(), 0));
    EXPECT_TRUE(at::equal(backward.dweight, in.dweight));
    EXPECT_TRUE(at::equal(backward.dbias, in.dbias));
    EXPECT_EQ(add_column_sums(pointer(backward.dbias), floats(backward.scratch), nullptr, 0, 64, dtype(),
                              current_stream()),
              0);
    EXPECT_TRUE(at::equal(backward.dbias, in.dbias));
  }
}

TRIREME_FOR_EACH_DTYPE(CudaNorm);

}  // namespace
}  // namespace trireme::kernels::cuda
