// Scaling by a factor that lies on the GPU.
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

}  // namespace
}  // namespace trireme::kernels::cuda
