#include "trireme/kernels/matmul.h"

#include <ATen/ATen.h>
#include <ATen/cpu/Utils.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/kernels/cpu_matmul.h"
#include "trireme/kernels/cublas_matmul.h"
#include "trireme/kernels/range.h"

namespace trireme::kernels {
namespace {

std::optional<cuda::Matrix> as_matrix(const at::Tensor& tensor) {
  const int64_t rows = tensor.size(0), columns = tensor.size(1);
  if (tensor.stride(1) == 1 && tensor.stride(0) >= columns) {
    return cuda::Matrix{tensor.const_data_ptr(), tensor.stride(0), false};
  }
  if (tensor.stride(0) == 1 && tensor.stride(1) >= rows) {
    return cuda::Matrix{tensor.const_data_ptr(), tensor.stride(1), true};
  }
  return {};
}

std::optional<cuda::MatmulCall> as_call(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                                        const at::Tensor& bias, const at::Tensor& addend) {
  const bool bf16 = a.scalar_type() == at::kBFloat16;
  const std::optional<cuda::Matrix> left = as_matrix(a), right = as_matrix(b);
  if (!out.is_cuda() || !(bf16 || a.scalar_type() == at::kHalf) || !left || !right || out.numel() == 0 ||
      a.numel() == 0) {
    return {};
  }
  const cuda::Dtype dtype = bf16 ? cuda::Dtype::kBFloat16 : cuda::Dtype::kHalf;
  return cuda::MatmulCall{.dtype = dtype,
                          .out_dtype = out.scalar_type() == at::kFloat ? cuda::Dtype::kFloat : dtype,
                          .m = a.size(0),
                          .n = b.size(1),
                          .k = a.size(1),
                          .a = *left,
                          .b = *right,
                          .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
                          .addend = addend.defined() ? addend.const_data_ptr() : nullptr,
                          .out = out.mutable_data_ptr()};
}

MatrixView view_of(const cuda::Matrix& matrix) {
  const auto* const data = static_cast<const float*>(matrix.data);
  return matrix.transposed ? MatrixView{data, 1, matrix.stride} : MatrixView{data, matrix.stride, 1};
}

/// Multiplies by our own kernel where that is the faster one; else returns false.
bool multiplied(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                const at::Tensor& addend) {
  const bool is_fp32 = out.scalar_type() == at::kFloat && a.scalar_type() == at::kFloat;
  if (!out.is_cpu() || !is_fp32 || out.numel() == 0 || a.numel() == 0) return false;
  const std::optional<cuda::Matrix> left = as_matrix(a), right = as_matrix(b);
  if (!left || !right || !multiplies_faster(view_of(*left))) return false;
  const auto times = [&](const at::Tensor& start, int64_t stride) {
    multiply(out.mutable_data_ptr<float>(), view_of(*left), view_of(*right), a.size(0), b.size(1), a.size(1),
             start.defined() ? start.const_data_ptr<float>() : nullptr, stride);
  };
  if (addend.defined()) {
    times(addend, out.size(1));
    if (bias.defined()) out.add_(bias);
  } else {
    times(bias, 0);
  }
  return true;
}

void check(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
           const at::Tensor& addend) {
  TRIREME_CHECK(a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0),
                "[kernels.matmul] ({}) @ ({}): both must be matrices, with equal inner sizes",
                fmt::join(a.sizes(), ", "), fmt::join(b.sizes(), ", "));
  const std::array<int64_t, 2> sizes = {a.size(0), b.size(1)};
  const auto check_one = [&](const at::Tensor& tensor, const char* name, at::IntArrayRef wanted) {
    if (!tensor.defined()) return;
    TRIREME_CHECK(tensor.sizes() == wanted && (wanted.empty() || tensor.is_contiguous()),
                  "[kernels.matmul] {} is ({}){}; it must be ({}) and contiguous", name,
                  fmt::join(tensor.sizes(), ", "), tensor.is_contiguous() ? "" : " and not contiguous",
                  fmt::join(wanted, ", "));
  };
  check_one(out, "out", sizes);
  check_one(bias, "bias", at::IntArrayRef(sizes).slice(1));
  check_one(addend, "addend", sizes);
  const auto check_same = [](const at::Tensor& tensor, const at::Tensor& with) {
    if (!tensor.defined()) return;
    TRIREME_CHECK(tensor.scalar_type() == with.scalar_type() && tensor.device() == with.device(),
                  "[kernels.matmul] {} on {} with {} on {}: both must have the same dtype and device",
                  c10::toString(tensor.scalar_type()), tensor.device().str(),
                  c10::toString(with.scalar_type()), with.device().str());
  };
  check_same(b, a);
  check_same(addend, out);
  check_same(bias, out);
  const bool is_sum = out.scalar_type() == at::kFloat && out.device() == a.device() && !bias.defined();
  if (!is_sum) check_same(out, a);
}

/// out = a @ b in the dtype of a and b, rounded there, plus the addend in the dtype of out.
void matmul_into_fp32(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& addend) {
  const at::Tensor product = at::mm(a, b);
  if (!addend.defined()) {
    out.copy_(product);
  } else if (addend.is_same(out)) {
    out.add_(product);
  } else {
    at::add_out(out, addend, product);
  }
}

}  // namespace

void matmul(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
            const at::Tensor& addend) {
  const OperatorRange traced("trireme::matmul");
  check(out, a, b, bias, addend);
  if (const auto call = as_call(out, a, b, bias, addend)) return cuda::matmul(*call);
  if (multiplied(out, a, b, bias, addend)) return;
  if (out.scalar_type() != a.scalar_type()) return matmul_into_fp32(out, a, b, addend);
  if (addend.defined() && addend.const_data_ptr() == out.const_data_ptr()) {
    out.addmm_(a, b);
    if (bias.defined()) out.add_(bias);
    return;
  }
  bias.defined() ? at::addmm_out(out, bias, a, b) : at::mm_out(out, a, b);
  if (addend.defined()) out.add_(addend);
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias,
                   const at::Tensor& addend) {
  at::Tensor out = at::empty({a.size(0), b.size(1)}, a.options());
  matmul(out, a, b, bias, addend);
  return out;
}

bool cpu_multiplies_bf16() {
  const auto known = at::cpu::get_cpu_capabilities();
  const auto architecture = known.find("architecture");
  if (architecture == known.end() || architecture->second.toStringRef() != "x86_64") return true;
  return std::ranges::any_of(std::array{"avx512_bf16", "amx_bf16"}, [&](const char* instructions) {
    const auto found = known.find(instructions);
    return found != known.end() && found->second.toBool();
  });
}

MatmulTuning::MatmulTuning(bool on) : before_(cuda::set_matmul_tuning(on)) {}

MatmulTuning::~MatmulTuning() {
  cuda::set_matmul_tuning(before_);
}

}  // namespace trireme::kernels
