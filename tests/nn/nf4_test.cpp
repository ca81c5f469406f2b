// NF4 against the values that its paper's authors publish, sought one by one in double; loops that
// encode against operators of ATen, which are what GPUs encode by.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/kernels/nf4.h"

namespace trireme::kernels {
namespace {

constexpr std::array<double, 16> kPublishedNf4 = {-1.0,
                                                  -0.6961928009986877,
                                                  -0.5250730514526367,
                                                  -0.39491748809814453,
                                                  -0.28444138169288635,
                                                  -0.18477343022823334,
                                                  -0.09105003625154495,
                                                  0.0,
                                                  0.07958029955625534,
                                                  0.16093020141124725,
                                                  0.24611230194568634,
                                                  0.33791524171829224,
                                                  0.44070982933044434,
                                                  0.5626170039176941,
                                                  0.7229568362236023,
                                                  1.0};

/// Numbers in (-size, size).
at::Tensor nf4_noise(int64_t count, uint64_t seed, double size = 1.0) {
  at::Tensor values = at::empty({count}, at::kFloat);
  for (int64_t i = 0; i < count; ++i) {
    const auto unit = static_cast<double>(mix64(seed, static_cast<uint64_t>(i)) >> 11) * 0x1.0p-53;
    values.data_ptr<float>()[i] = static_cast<float>(size * (2.0 * unit - 1.0));
  }
  return values;
}

at::Tensor nf4_encoded(const at::Tensor& values) {
  at::Tensor blocks = at::empty({(values.numel() + kNf4Block - 1) / kNf4Block, kNf4Bytes}, at::kByte);
  nf4_encode(blocks, values);
  return blocks;
}

at::Tensor nf4_decoded(const at::Tensor& blocks, int64_t count, at::ScalarType dtype = at::kFloat) {
  at::Tensor out = at::empty({count}, dtype);
  nf4_decode(out, blocks);
  return out;
}

int code_at(const at::Tensor& blocks, int64_t number) {
  const int64_t inside = number % kNf4Block;
  const auto byte = nf4_codes(blocks)[number / kNf4Block][inside / 2].item<int>();
  return inside % 2 == 0 ? byte >> 4 : byte & 15;
}

TEST(Nf4, CodesAreTheNearestOfThePublishedValues) {
  const at::Tensor values = nf4_noise(4 * kNf4Block, 7, 0.02), blocks = nf4_encoded(values);
  for (int64_t block = 0; block < 4; ++block) {
    const at::Tensor part = values.narrow(0, block * kNf4Block, kNf4Block);
    const auto magnitude = part.abs().max().item<float>();
    EXPECT_EQ(nf4_magnitudes(blocks)[block].item<float>(), magnitude);
    for (int64_t i = 0; i < kNf4Block; ++i) {
      const double x = static_cast<double>(part[i].item<float>()) / static_cast<double>(magnitude);
      size_t nearest = 0;
      for (size_t code = 1; code < kPublishedNf4.size(); ++code)
        if (std::abs(x - kPublishedNf4[code]) < std::abs(x - kPublishedNf4[nearest])) nearest = code;
      EXPECT_EQ(code_at(blocks, block * kNf4Block + i), static_cast<int>(nearest)) << x;
    }
  }
}

TEST(Nf4, TheFirstOfTwoNumbersIsInTheUpperHalfOfTheirByte) {
  at::Tensor values = at::zeros({kNf4Block}, at::kFloat);
  values[0] = 1.0;
  values[1] = -1.0;
  const at::Tensor codes = nf4_codes(nf4_encoded(values));
  EXPECT_EQ(codes[0][0].item<int>(), 0xf0);
  EXPECT_EQ(codes[0][1].item<int>(), 0x77);
}

TEST(Nf4, EveryValueIsItsOwnAndOfTwoEquallyNearTheLowerIsTaken) {
  at::Tensor values = at::zeros({kNf4Block}, at::kFloat);
  for (int64_t i = 0; i < 16; ++i) {
    const auto code = static_cast<size_t>(i);
    values[i] = kPublishedNf4[code];
    if (i == 15) break;
    const auto low = static_cast<float>(kPublishedNf4[code]),
               high = static_cast<float>(kPublishedNf4[code + 1]);
    const float between = (low + high) / 2.0F;
    values[16 + i] = between;
    values[32 + i] = std::nextafter(between, 2.0F);
  }
  const at::Tensor blocks = nf4_encoded(values);
  for (int64_t i = 0; i < 15; ++i) {
    EXPECT_EQ(code_at(blocks, i), i);
    EXPECT_EQ(code_at(blocks, 16 + i), i);
    EXPECT_EQ(code_at(blocks, 32 + i), i + 1);
  }
  EXPECT_TRUE(nf4_decoded(blocks, 16).equal(values.narrow(0, 0, 16)));
}

TEST(Nf4, BlocksOfZerosConstantsTinyAndHugeNumbersDecode) {
  EXPECT_TRUE(nf4_decoded(nf4_encoded(at::zeros({kNf4Block})), kNf4Block).eq(0).all().item<bool>());
  for (const float constant : {1e-45F, -1e-40F, 1e-38F, 3e-5F, -1.0F, 3.4e38F}) {
    const at::Tensor values = at::full({kNf4Block}, constant, at::kFloat),
                     decoded = nf4_decoded(nf4_encoded(values), kNf4Block);
    EXPECT_TRUE(decoded.isfinite().all().item<bool>()) << constant;
    if (std::abs(constant) < 1e-38F) continue;
    EXPECT_TRUE(decoded.equal(values)) << constant;
  }
  for (const float poison :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    at::Tensor values = nf4_noise(kNf4Block, 3);
    values[5] = poison;
    const at::Tensor decoded = nf4_decoded(nf4_encoded(values), kNf4Block);
    EXPECT_FALSE(decoded.isfinite().any().item<bool>());
  }
}

TEST(Nf4, AShortLastBlockIsThatOfNumbersFollowedByZeros) {
  for (const int64_t rest : {1, 2, 31, 63}) {
    const at::Tensor values = nf4_noise(2 * kNf4Block + rest, 11);
    const at::Tensor padded = at::constant_pad_nd(values, {0, kNf4Block - rest});
    const at::Tensor blocks = nf4_encoded(values);
    EXPECT_TRUE(blocks.equal(nf4_encoded(padded)));
    EXPECT_TRUE(nf4_decoded(blocks, values.numel())
                    .equal(nf4_decoded(blocks, padded.numel()).narrow(0, 0, values.numel())));
  }
}

TEST(Nf4, DecodedNumbersAreRoundedOnce) {
  const at::Tensor blocks = nf4_encoded(nf4_noise(3 * kNf4Block + 5, 23, 0.3));
  const int64_t count = 3 * kNf4Block + 5;
  const at::Tensor exact = nf4_decoded(blocks, count);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf})
    EXPECT_TRUE(nf4_decoded(blocks, count, dtype).equal(exact.to(dtype)));
  const at::Tensor codes = nf4_codes(blocks), magnitudes = nf4_magnitudes(blocks);
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(kPublishedNf4[static_cast<size_t>(code_at(blocks, i))]);
    EXPECT_EQ(exact[i].item<float>(), value * magnitudes[i / kNf4Block].item<float>());
  }
}

TEST(Nf4, OperatorsComputeTheBitsOfTheLoops) {
  for (const int64_t count : {int64_t{64}, int64_t{640}, int64_t{1000}, (int64_t{1} << 22) + 100}) {
    at::Tensor values = nf4_noise(count, 5, 0.7);
    values.narrow(0, 0, 64).mul_(1e-39);
    const at::Tensor blocks = nf4_encoded(values);
    at::Tensor other = at::empty_like(blocks);
    nf4_encode_by_operators(other, values);
    ASSERT_TRUE(other.equal(blocks)) << count;
  }
}

TEST(Nf4, OtherSizesAndDtypesAreRefused) {
  at::Tensor blocks = at::empty({2, kNf4Bytes}, at::kByte), values = at::zeros({kNf4Block}, at::kFloat);
  EXPECT_THROW(nf4_encode(blocks, values), LogicError);
  at::Tensor one = blocks.narrow(0, 0, 1), whole_numbers = at::zeros({kNf4Block}, at::kInt);
  EXPECT_THROW(nf4_encode(one, values.to(at::kBFloat16)), LogicError);
  EXPECT_THROW(nf4_decode(whole_numbers, one), LogicError);
}

}  // namespace
}  // namespace trireme::kernels
