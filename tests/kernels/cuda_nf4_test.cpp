// NF4 on a GPU against the loops of a CPU, bit for bit.
#include "trireme/kernels/nf4.h"

#include <algorithm>
#include <limits>

#include "tests/kernels/cuda_support.h"

namespace trireme::kernels::cuda {
namespace {

class Nf4OnGpu : public CudaDtypeTest {};
TRIREME_FOR_EACH_DTYPE(Nf4OnGpu);

at::Tensor encoded_like(const at::Tensor& values) {
  const int64_t count = (values.numel() + kNf4Block - 1) / kNf4Block;
  at::Tensor blocks = at::empty({count, kNf4Bytes}, values.options().dtype(at::kByte));
  kernels::nf4_encode(blocks, values);
  return blocks;
}

/// Places of elements that lie at a multiple of 16 bytes, and of some that do not.
TEST_P(Nf4OnGpu, HasTheBitsOfTheCpu) {
  for (const int64_t count : {1, 7, 8, 63, 64, 65, 4096, 100'003, (1 << 22) + 100}) {
    at::Tensor values = noise({count}, at::kFloat, 1, 0.02);
    values.narrow(0, 0, std::min<int64_t>(count, 64)).mul_(1e-39);
    const at::Tensor blocks = encoded_like(values), expected = encoded_like(values.cpu());
    ASSERT_TRUE(blocks.cpu().equal(expected)) << count;
    at::Tensor on_cpu = at::empty({count}, type());
    kernels::nf4_decode(on_cpu, expected);
    for (const int64_t shift : {0, 3, 8}) {
      const at::Tensor room = at::full({count + 16}, 5.0, values.options().dtype(type()));
      at::Tensor place = room.narrow(0, shift, count);
      kernels::nf4_decode(place, blocks);
      EXPECT_TRUE(place.cpu().equal(on_cpu)) << count << " at " << shift;
      EXPECT_TRUE(room.narrow(0, shift + count, 16 - shift).eq(5.0).all().item<bool>()) << "beyond the end";
      EXPECT_TRUE(room.narrow(0, 0, shift).eq(5.0).all().item<bool>()) << "before the beginning";
    }
  }
}

TEST_F(CudaTest, Nf4OfBadNumbersIsNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    at::Tensor values = noise({128}, at::kFloat, 2);
    values[70] = bad;
    at::Tensor out = at::empty({128}, values.options());
    kernels::nf4_decode(out, encoded_like(values));
    EXPECT_FALSE(out[70].isfinite().item<bool>());
    EXPECT_TRUE(out.narrow(0, 0, 64).isfinite().all().item<bool>());
  }
}

}  // namespace
}  // namespace trireme::kernels::cuda
