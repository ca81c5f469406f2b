// FP8 on a GPU: casts have the bits of the CPU's, products those of the values they stand for.
#include <fmt/format.h>

#include "tests/kernels/cuda_support.h"
#include "tests/support/fp8_cases.h"
#include "trireme/kernels/fp8.h"

namespace trireme::kernels {
namespace {

class CudaFp8 : public cuda::CudaTest {
 protected:
  static bool lacks(Fp8Scaling scaling) { return !fp8_lack(at::Device(at::kCUDA, 0), scaling).empty(); }
};

at::Tensor bytes_of(const at::Tensor& values) {
  return values.view(at::kByte).cpu();
}

/// Padding of scales is nobody's.
at::Tensor scale_of(const Fp8Matrix& matrix) {
  const bool square = matrix.span == Fp8Span::kSquareBlock;
  return (square ? matrix.scale.narrow(1, 0, matrix.values.size(1) / kFp8Block) : matrix.scale).cpu();
}

void expect_same(const Fp8Matrix& got, const Fp8Matrix& wanted, const std::string& what) {
  ASSERT_EQ(got.values.sizes(), wanted.values.sizes()) << what;
  EXPECT_TRUE(at::equal(scale_of(got), scale_of(wanted))) << what << ": scales";
  EXPECT_TRUE(at::equal(bytes_of(got.values), bytes_of(wanted.values))) << what << ": values";
}

TEST_F(CudaFp8, CastsHaveTheBitsOfTheCpu) {
  struct Sizes {
    int64_t rows, columns;
  };
  for (const test::Fp8Case& one : test::fp8_casts()) {
    const bool blocks = one.cast.scaling == Fp8Scaling::kBlock;
    for (const auto& [rows, columns] : {Sizes{128, 128}, Sizes{640, 384}, Sizes{16, 16}, Sizes{144, 272},
                                        Sizes{48, 1040}, Sizes{1168, 32}}) {
      if (blocks && (rows % kFp8Block != 0 || columns % kFp8Block != 0)) continue;
      const at::Tensor x = test::wide_values(rows, columns, 3), on_gpu = x.cuda();
      const at::Tensor amax = fp8_amax(x, one.cast.scaling), gpu_amax = fp8_amax(on_gpu, one.cast.scaling);
      if (!blocks) {
        EXPECT_TRUE(at::equal(gpu_amax.cpu(), amax)) << one.name;
      }
      const std::string what = fmt::format("{} of {} x {}", one.name, rows, columns);
      const Fp8Copies wanted = fp8_cast(x, amax, one.cast), got = fp8_cast(on_gpu, gpu_amax, one.cast);
      expect_same(got.plain, wanted.plain, what + ", plain");
      expect_same(got.transposed, wanted.transposed, what + ", transposed");
      expect_same(fp8_cast(on_gpu, gpu_amax, one.cast, Fp8Copy::kPlain).plain, wanted.plain,
                  what + ", alone");
      expect_same(fp8_cast(on_gpu, gpu_amax, one.cast, Fp8Copy::kTransposed).transposed, wanted.transposed,
                  what + ", transposed alone");
    }
  }
}

TEST_F(CudaFp8, PartsOfWeightsHaveTheBitsOfTheCpuAndOfCastsOfTheWholeMatrix) {
  for (const int64_t rows : {16, 144, 4096}) {
    const at::Tensor x = test::wide_values(rows, 272, 9).to(at::kFloat) * 1.003f, on_gpu = x.cuda();
    const at::Tensor bf16 = on_gpu.to(at::kBFloat16);
    const Fp8Matrix whole = fp8_cast(bf16, fp8_amax(bf16, Fp8Scaling::kTensor), {}).plain;
    at::Tensor amax = at::zeros({1}, on_gpu.options()), cpu_amax = at::zeros({1});
    const std::vector<int64_t> ends = {0, 8, rows * 96, rows * 272};
    const auto part = [](const at::Tensor& all, int64_t from, int64_t to) {
      return all.view({-1}).narrow(0, from, to - from);
    };
    for (size_t i = 1; i < ends.size(); ++i) {
      raise_fp8_amax(amax, part(on_gpu, ends[i - 1], ends[i]));
      raise_fp8_amax(cpu_amax, part(x, ends[i - 1], ends[i]));
    }
    EXPECT_TRUE(at::equal(amax.cpu(), cpu_amax)) << rows;
    EXPECT_TRUE(at::equal(fp8_scale(amax), whole.scale)) << rows;
    EXPECT_TRUE(at::equal(fp8_scale(amax).cpu(), fp8_scale(cpu_amax))) << rows;
    for (const bool sees : {false, true}) {
      const at::Tensor seen = sees ? at::zeros({1}, on_gpu.options()) : at::Tensor();
      const at::Tensor cpu_seen = sees ? at::zeros({1}) : at::Tensor();
      for (size_t i = 1; i < ends.size(); ++i) {
        const auto bytes = at::TensorOptions().dtype(at::kByte);
        at::Tensor got = at::empty({ends[i] - ends[i - 1]}, bytes.device(at::kCUDA)),
                   wanted = at::empty({ends[i] - ends[i - 1]}, bytes);
        fp8_cast_part(got, part(on_gpu, ends[i - 1], ends[i]), amax, seen);
        fp8_cast_part(wanted, part(x, ends[i - 1], ends[i]), cpu_amax, cpu_seen);
        EXPECT_TRUE(at::equal(got.cpu(), wanted)) << rows;
        EXPECT_TRUE(at::equal(got, part(whole.values.view(at::kByte), ends[i - 1], ends[i]))) << rows;
      }
      if (sees) {
        EXPECT_TRUE(at::equal(seen.cpu(), cpu_seen) && at::equal(seen, amax)) << rows;
      }
    }
    expect_same(fp8_transposed(whole), fp8_cast(bf16, amax, {}, Fp8Copy::kTransposed).transposed, "turned");
  }
}

TEST_F(CudaFp8, CastsByAnotherMagnitudeHaveTheBitsOfTheCpuAndSeeWhatItSees) {
  for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
    for (const auto& [rows, columns] : {std::pair(640, 384), std::pair(16, 16), std::pair(144, 272)}) {
      const at::Tensor x = test::wide_values(rows, columns, 3);
      for (const double factor : {0.25, 1.0, 8.0}) {
        const at::Tensor amax = fp8_amax(x, Fp8Scaling::kTensor) * factor;
        const at::Tensor seen = at::zeros({1}), gpu_seen = seen.cuda();
        const Fp8Cast cast{.format = format};
        const Fp8Copies wanted = fp8_cast(x, amax, cast, Fp8Copy::kBoth, seen);
        const Fp8Copies got = fp8_cast(x.cuda(), amax.cuda(), cast, Fp8Copy::kBoth, gpu_seen);
        const std::string what = fmt::format("{} x {} by {}", rows, columns, factor);
        expect_same(got.plain, wanted.plain, what + ", plain");
        expect_same(got.transposed, wanted.transposed, what + ", transposed");
        EXPECT_TRUE(at::equal(gpu_seen.cpu(), seen)) << what;
      }
    }
  }
}

TEST_F(CudaFp8, CastsOfSwigluAreThoseOfItsValues) {
  const auto check = [](const Fp8Source& source, const Fp8Cast& cast, const std::string& what) {
    const at::Tensor values = source.computed();
    const bool tensor = cast.scaling == Fp8Scaling::kTensor;
    const auto seen = [&] {
      return tensor ? at::zeros({1}, values.options().dtype(at::kFloat)) : at::Tensor();
    };
    const at::Tensor amax = fp8_amax(values, cast.scaling), saw = seen(), should_see = seen();
    const Fp8Copies wanted = fp8_cast(values, amax, cast, Fp8Copy::kBoth, should_see);
    const Fp8Copies got = fp8_cast(source, amax, cast, Fp8Copy::kBoth, saw);
    expect_same(got.plain, wanted.plain, what + ", plain");
    expect_same(got.transposed, wanted.transposed, what + ", transposed");
    if (tensor) {
      EXPECT_TRUE(at::equal(saw, should_see)) << what;
    }
    expect_same(fp8_cast(source, amax, cast, Fp8Copy::kPlain, seen()).plain, wanted.plain, what + ", alone");
  };
  for (const Fp8Scaling scaling : {Fp8Scaling::kTensor, Fp8Scaling::kBlock}) {
    for (const Fp8Format format : {Fp8Format::kE4m3, Fp8Format::kE5m2}) {
      for (const auto& [rows, width] :
           {std::pair(128, 128), std::pair(384, 640), std::pair(144, 48), std::pair(16, 272)}) {
        if (scaling == Fp8Scaling::kBlock && (rows % kFp8Block != 0 || width % kFp8Block != 0)) continue;
        const at::Tensor gate_up = test::wide_values(rows, 2 * width, 3).cuda();
        const at::Tensor dy = test::wide_values(rows, width, 4).cuda();
        const std::string what = fmt::format("{} x {}", rows, width);
        check(Fp8Source::swiglu(gate_up), {scaling, format, false}, what + " forward");
        check(Fp8Source::swiglu_gradient(gate_up, dy), {scaling, format, false}, what + " backward");
      }
    }
  }
}

TEST_F(CudaFp8, WhatIsNotFiniteStaysSo) {
  for (const test::Fp8Case& one : test::fp8_casts()) {
    for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      at::Tensor x = test::wide_values(128, 256, 3).cuda();
      x[100][200].fill_(bad);
      const Fp8Copies got = fp8_cast(x, fp8_amax(x, one.cast.scaling), one.cast);
      EXPECT_FALSE(std::isfinite(dequantized(got.plain)[100][200].item<double>())) << one.name;
      EXPECT_FALSE(std::isfinite(dequantized(got.transposed)[200][100].item<double>())) << one.name;
    }
  }
}

TEST_F(CudaFp8, ProductsAreThoseOfTheValuesTheyStandFor) {
  struct Sizes {
    int64_t m, n, k;
  };
  for (const test::Fp8Product& one : test::fp8_products()) {
    if (lacks(one.a.scaling)) continue;
    for (const auto& [m, n, k] : {Sizes{128, 256, 384}, Sizes{1024, 2048, 512}}) {
      const test::Fp8Operands operands = test::operands_of(one, m, n, k, at::kCUDA);
      const at::Tensor exact =
          dequantized(operands.a).to(at::kDouble).mm(dequantized(operands.b).to(at::kDouble).t());
      for (const bool fast : {false, true}) {
        // Tensor cores keep 14 bits of partial sums: of the whole sum where fast, else of 128 terms.
        const double of_largest = fast ? 0x1.0p-9 : 0x1.0p-10;
        for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat}) {
          const std::string what = fmt::format("{} {} x {} x {} to {}{}", one.name, m, n, k,
                                               c10::toString(dtype), fast ? ", fast" : "");
          const at::Tensor addend = cuda::noise({m, n}, dtype, 3);
          at::Tensor out = at::empty_like(addend), sum = addend.clone();
          fp8_matmul(out, operands.a, operands.b, fast);
          test::expect_near_product(out, exact, what, of_largest);
          fp8_matmul(sum, operands.a, operands.b, fast, {}, sum);
          test::expect_near_product(sum, exact + addend.to(at::kDouble), what + " in place", of_largest);
          if (dtype == at::kFloat) continue;
          const at::Tensor bias = cuda::noise({n}, dtype, 4);
          fp8_matmul(out, operands.a, operands.b, fast, bias, addend);
          test::expect_near_product(out, exact + bias.to(at::kDouble) + addend.to(at::kDouble),
                                    what + " with bias and addend", of_largest);
        }
      }
    }
  }
}

}  // namespace
}  // namespace trireme::kernels
