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
      ASSERT_EQ(scale(y.mutable_data_ptr(), x.const_data_ptr(), on_gpu.const_data_ptr<float>(), true, count,
                      dtype(), current_stream()),
                0);
      expect_close(y, sum, relative(), 1e-6, "added");
      ASSERT_EQ(scale(x.mutable_data_ptr(), x.const_data_ptr(), on_gpu.const_data_ptr<float>(), false, count,
                      dtype(), current_stream()),
                0);
      expect_close(x, product, relative(), 1e-6, "in place");
    }
  }
}

}  // namespace
}  // namespace trireme::kernels::cuda
