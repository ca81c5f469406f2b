#include "trireme/kernels/moment.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::kernels {
namespace {

constexpr int64_t blocks_of(int64_t count) {
  return (count + kMomentBlock - 1) / kMomentBlock;
}

at::ScalarType dtype_of(MomentFormat format) {
  switch (format) {
    case MomentFormat::kFp32:
      return at::kFloat;
    case MomentFormat::kBf16:
      return at::kBFloat16;
    case MomentFormat::kInt8:
      break;
  }
  return at::kChar;
}

/// (blocks, kMomentBlock), with zeros behind the last element.
at::Tensor in_blocks(const at::Tensor& values) {
  const int64_t padding = blocks_of(values.numel()) * kMomentBlock - values.numel();
  return at::constant_pad_nd(values, {0, padding}).view({-1, kMomentBlock});
}

/// The powers of two that have these exponents as fp32 has them.
at::Tensor powers(const at::Tensor& exponents) {
  return exponents.bitwise_left_shift(23).view(at::kFloat);
}

}  // namespace

Moment::Moment(int64_t count, MomentFormat format, MomentKind kind, at::Device device)
    : format_(format),
      kind_(kind),
      values_(at::zeros({count}, at::TensorOptions().dtype(dtype_of(format)).device(device))) {
  if (format == MomentFormat::kInt8)
    exponents_ = at::full({blocks_of(count)}, static_cast<int64_t>(detail::kSmallestPower),
                          values_.options().dtype(at::kByte));
}

Moment::Moment(MomentFormat format, MomentKind kind, at::Tensor values, at::Tensor exponents)
    : format_(format), kind_(kind), values_(std::move(values)), exponents_(std::move(exponents)) {}

Moment Moment::in(const at::Tensor& values, MomentKind kind) {
  TRIREME_CHECK(values.scalar_type() == at::kFloat && values.dim() == 1 && values.is_contiguous(),
                "[kernels.moment] moments are {} of {} dimensions; pass a contiguous range in fp32",
                c10::toString(values.scalar_type()), values.dim());
  return {MomentFormat::kFp32, kind, values, {}};
}

Moment Moment::part(int64_t begin, int64_t end) const {
  TRIREME_CHECK(format_ == MomentFormat::kFp32 || begin % kMomentBlock == 0,
                "[kernels.moment] a range of moments begins at element {}; in fewer bits than fp32 it must "
                "begin at a multiple of {}",
                begin, kMomentBlock);
  at::Tensor exponents;
  if (exponents_.defined()) exponents = exponents_.slice(0, begin / kMomentBlock, blocks_of(end));
  return {format_, kind_, values_.slice(0, begin, end), exponents};
}

at::Tensor Moment::read() const {
  if (format_ != MomentFormat::kInt8) return values_.to(at::kFloat);
  // The arithmetic of from_moment_int8().
  const at::Tensor exponent = exponents_.to(at::kInt);
  const at::Tensor unit =
      at::where(exponent == static_cast<int64_t>(detail::kNotFinite), std::nan(""), powers(exponent - 6));
  const at::Tensor roots =
      (in_blocks(values_).to(at::kFloat) * unit.unsqueeze(1)).flatten().slice(0, 0, values_.numel());
  return kind_ == MomentKind::kSquares ? roots * roots : roots.contiguous();
}

void Moment::write(const at::Tensor& values) const {
  if (format_ != MomentFormat::kInt8) {
    at::Tensor(values_).copy_(values);
    return;
  }
  const at::Tensor roots = in_blocks(kind_ == MomentKind::kSquares ? values.sqrt() : values);
  // The arithmetic of exponent_of() and to_moment_int8(), but for the rounding.
  const at::Tensor most = roots.abs().amax(1).contiguous().view(at::kInt);
  const at::Tensor exponent =
      at::where(most >= static_cast<int64_t>(detail::kInfinityBits), static_cast<int64_t>(detail::kNotFinite),
                (most + 0x1ffff).bitwise_right_shift(23).clamp(detail::kSmallestPower, 254));
  at::Tensor rounded =
      (roots * powers(260 - exponent.to(at::kInt)).unsqueeze(1)).round().clamp(-127.0, 127.0);
  if (kind_ == MomentKind::kSquares) rounded = at::where(roots > 0, rounded.clamp_min(1.0), rounded);
  at::Tensor(exponents_).copy_(exponent);
  at::Tensor(values_).copy_(rounded.nan_to_num(0.0).flatten().slice(0, 0, values_.numel()));
}

int64_t Moment::bytes() const {
  return static_cast<int64_t>(values_.nbytes() + (exponents_.defined() ? exponents_.nbytes() : 0));
}

}  // namespace trireme::kernels
