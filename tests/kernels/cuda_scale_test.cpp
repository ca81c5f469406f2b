// Scaling by a factor that lies on the GPU, and by one for each column.
#include "tests/kernels/cuda_support.h"

namespace trireme::kernels::cuda {
namespace {

class Scale : public CudaDtypeTest {};
TRIREME_FOR_EACH_DTYPE(Scale);

TEST_P(Scale, WritesAndAddsTheProductRoundedOnce) {
  const double factor = static_cast<double>(1.0f / 3.0f);
  const at::Tensor on_gpu = at::full({}, 1.0f / 3.0f, at::TensorOptions(at::kCUDA));
  for (const int64_t count : {0, 1, 7, 8, 4096, 1'000'003}) {
    for (const bool is_aligned : {true, false}) {
      at::Tensor x = noise({count}, type(), 1), y = noise({count}, type(), 2);
      if (!is_aligned) x = unaligned(x);
      const at::Tensor sum = in_double(y) + in_double(x) * factor, product = in_double(x) * factor;
      at::Tensor wide = y.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
      const auto run = [&](at::Tensor& to, bool adds) {
        ASSERT_EQ(scale(to.mutable_data_ptr(), dtype_of(to.scalar_type()), x.const_data_ptr(),
                        on_gpu.const_data_ptr<float>(), adds, count, dtype(), current_stream()),
                  0);
      };
      run(y, true);
      expect_close(y, sum, relative(), 1e-6, "added");
      run(wide, true);
      expect_close(wide, sum, 1e-6, 1e-6, "added to fp32");
      run(wide, false);
      expect_close(wide, product, 1e-6, 1e-6, "written to fp32");
      run(x, false);
      expect_close(x, product, relative(), 1e-6, "in place");
    }
  }
}

/// Fewer rows than walkers and many more, ragged widths, and blocks of columns that end within a warp.
TEST_P(Scale, OfColumnsFollowsTheFormulaBothWays) {
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{1, 1},     {1, 64},      {3, 7},      {130, 264},
                                                     {999, 129}, {5003, 3072}, {64, 16384}, {9, 1}};
  for (const auto& [rows, width] : kShapes) {
    const at::Tensor factors = noise({width}, at::kFloat, 4);
    for (const bool is_aligned : {true, false}) {
      at::Tensor x = noise({rows, width}, type(), 5), dy = noise({rows, width}, type(), 6);
      if (!is_aligned) x = unaligned(x);
      at::Tensor y = at::full_like(dy, NAN), dx = at::full_like(dy, NAN), again = at::full_like(dy, NAN);
      at::Tensor sums = at::full_like(factors, NAN), same_sums = at::full_like(factors, NAN);
      at::Tensor scratch = at::empty({column_scratch(width)}, factors.options());
      const auto backward = [&](at::Tensor& to, at::Tensor& d_factors) {
        ASSERT_EQ(scale_columns_backward(to.mutable_data_ptr(), floats(d_factors), floats(scratch),
                                         dy.const_data_ptr(), x.const_data_ptr(), floats(factors), rows,
                                         width, dtype(), current_stream()),
                  0);
      };
      ASSERT_EQ(scale_columns(y.mutable_data_ptr(), x.const_data_ptr(), floats(factors), rows, width, dtype(),
                              current_stream()),
                0);
      backward(dx, sums);
      const at::Tensor exact_sums = (in_double(dy) * in_double(x)).sum(0);
      expect_close(y, in_double(x) * in_double(factors), relative(), 1e-6, "y");
      expect_close(dx, in_double(dy) * in_double(factors), relative(), 1e-6, "dx");
      expect_close(sums, exact_sums, 1e-5, 1e-6 * static_cast<double>(rows), "d_factors");
      backward(again, same_sums);
      EXPECT_TRUE(at::equal(same_sums, sums)) << rows << " x " << width;
    }
  }
}

}  // namespace
}  // namespace trireme::kernels::cuda
