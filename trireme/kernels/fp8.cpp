#include "trireme/kernels/fp8.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <cmath>

#include "trireme/base/error.h"
#include "trireme/kernels/cublas_matmul.h"
#include "trireme/kernels/cuda_kernels.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/range.h"
#include "trireme/kernels/tensor_ops.h"

namespace trireme::kernels {
namespace {

at::ScalarType dtype_of(Fp8Format format) {
  return format == Fp8Format::kE4m3 ? at::kFloat8_e4m3fn : at::kFloat8_e5m2;
}

Fp8Format format_of(const at::Tensor& values) {
  return values.scalar_type() == at::kFloat8_e4m3fn ? Fp8Format::kE4m3 : Fp8Format::kE5m2;
}

void launched_fp8(int error, const char* operation) {
  if (error != 0) throw LogicError("[kernels.{}] launch failed: {}", operation, gpu_error_text(error));
}

void check_matrix(const at::Tensor& x) {
  TRIREME_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == at::kBFloat16,
                "[kernels.fp8] the tensor is ({}) of {}; it must be a contiguous bf16 matrix",
                fmt::join(x.sizes(), ", "), c10::toString(x.scalar_type()));
}

void check_input(const at::Tensor& x, Fp8Scaling scaling) {
  const int64_t multiple = fp8_multiple(scaling);
  check_matrix(x);
  TRIREME_CHECK(x.size(0) % multiple == 0 && x.size(1) % multiple == 0,
                "[kernels.fp8] the matrix is ({}); both sizes must be multiples of {}",
                fmt::join(x.sizes(), ", "), multiple);
}

int64_t blocks(int64_t size) {
  return size / kFp8Block;
}

/// cuBLASLt wants rows of 16 bytes.
int64_t padded_blocks(int64_t size) {
  constexpr int64_t kFloats = 4;
  return (blocks(size) + kFloats - 1) / kFloats * kFloats;
}

Fp8Span span_of(const Fp8Cast& cast) {
  switch (cast.scaling) {
    case Fp8Scaling::kTensor:
      return Fp8Span::kTensor;
    case Fp8Scaling::kRow:
      return Fp8Span::kRow;
    case Fp8Scaling::kBlock:
      break;
  }
  return cast.weight ? Fp8Span::kSquareBlock : Fp8Span::kRowBlock;
}

std::vector<int64_t> scale_sizes(Fp8Span span, int64_t rows, int64_t columns) {
  switch (span) {
    case Fp8Span::kTensor:
      return {1};
    case Fp8Span::kRow:
      return {rows};
    case Fp8Span::kRowBlock:
      return {blocks(columns), rows};
    case Fp8Span::kSquareBlock:
      break;
  }
  return {blocks(rows), padded_blocks(columns)};
}

Fp8Matrix empty_matrix(const at::Tensor& like, int64_t rows, int64_t columns, const Fp8Cast& cast) {
  const Fp8Span span = span_of(cast);
  return {.values = at::empty({rows, columns}, like.options().dtype(dtype_of(cast.format))),
          .scale = at::empty(scale_sizes(span, rows, columns), like.options().dtype(at::kFloat)),
          .span = span};
}

/// Each scale repeated for the elements of its span: what broadcasts to (rows, columns).
at::Tensor spread(const at::Tensor& scale, Fp8Span span, int64_t columns) {
  switch (span) {
    case Fp8Span::kTensor:
      return scale;
    case Fp8Span::kRow:
      return scale.unsqueeze(1);
    case Fp8Span::kRowBlock:
      return scale.t().repeat_interleave(kFp8Block, 1);
    case Fp8Span::kSquareBlock:
      break;
  }
  return scale.narrow(1, 0, blocks(columns)).repeat_interleave(kFp8Block, 0).repeat_interleave(kFp8Block, 1);
}

/// The largest magnitude of each span of `x` fp32, in the form of a scale.
at::Tensor amax_of_spans(const at::Tensor& x, Fp8Span span) {
  const at::Tensor magnitudes = x.abs();
  switch (span) {
    case Fp8Span::kTensor:
      return magnitudes.numel() == 0 ? at::zeros({1}, x.options()) : magnitudes.amax().unsqueeze(0);
    case Fp8Span::kRow:
      return magnitudes.amax(1);
    case Fp8Span::kRowBlock:
      return magnitudes.view({x.size(0), blocks(x.size(1)), kFp8Block}).amax(2).t().contiguous();
    case Fp8Span::kSquareBlock:
      break;
  }
  const at::Tensor of_blocks =
      magnitudes.view({blocks(x.size(0)), kFp8Block, blocks(x.size(1)), kFp8Block}).amax({1, 3});
  return at::constant_pad_nd(of_blocks, {0, padded_blocks(x.size(1)) - blocks(x.size(1))});
}

void check_source(const Fp8Source& source, const Fp8Cast& cast, const at::Tensor& seen) {
  check_input(source.x(), cast.scaling);
  if (source.dy().defined()) check_input(source.dy(), cast.scaling);
  const int64_t multiple = fp8_multiple(cast.scaling);
  TRIREME_CHECK(source.columns() % multiple == 0,
                "[kernels.fp8] the matrix has {} columns; the number must be a multiple of {}",
                source.columns(), multiple);
  TRIREME_CHECK(!seen.defined() || cast.scaling == Fp8Scaling::kTensor,
                "[kernels.fp8] only tensorwise scaling can use a magnitude from elsewhere");
  TRIREME_CHECK(!source.is_swiglu() || seen.defined() || (cast.scaling == Fp8Scaling::kBlock && !cast.weight),
                "[kernels.fp8] SwiGLU can be fused into the cast only with blockwise scaling of activations "
                "or with a magnitude from elsewhere");
}

void check_part(const at::Tensor& x) {
  constexpr int64_t kMultiple = 8;
  TRIREME_CHECK(x.scalar_type() == at::kFloat && x.is_contiguous() && x.numel() % kMultiple == 0,
                "[kernels.fp8] a part of the weights has {} elements of {}; it must be contiguous fp32 and a "
                "multiple of {} elements",
                x.numel(), c10::toString(x.scalar_type()), kMultiple);
}

/// The cast on a CPU, in fp32 and in the order in which the GPU's kernel computes.
Fp8Matrix cast_on_cpu(const at::Tensor& x, const at::Tensor& amax, const Fp8Cast& cast) {
  const Fp8Span span = span_of(cast);
  const at::Tensor counted = at::where(amax < kSmallestAmax, kSmallestAmax, amax).to(at::kFloat);
  const double most = largest(cast.format);
  const at::Tensor inverse = at::full_like(counted, most).div_(counted);
  const at::Tensor values = x.to(at::kFloat);
  const at::Tensor scaled =
      at::where(values.isfinite(), values * spread(inverse, span, x.size(1)), std::nan(""));
  return {
      .values = scaled.clamp_(-most, most).to(dtype_of(cast.format)), .scale = counted / most, .span = span};
}

cuda::Fp8Of computed_as(const Fp8Source& source) {
  if (!source.is_swiglu()) return cuda::Fp8Of::kValues;
  return source.dy().defined() ? cuda::Fp8Of::kSwigluGradient : cuda::Fp8Of::kSwiglu;
}

cuda::Fp8CastCall call_of(const Fp8Source& source, const at::Tensor& amax, const Fp8Cast& cast,
                          const at::Tensor& seen) {
  return {.x = source.x().const_data_ptr(),
          .amax = amax.defined() ? amax.const_data_ptr<float>() : nullptr,
          .rows = source.rows(),
          .columns = source.columns(),
          .span = span_of(cast),
          .format = cast.format,
          .seen = seen.defined() ? seen.mutable_data_ptr<float>() : nullptr,
          .of = computed_as(source),
          .dy = source.dy().defined() ? source.dy().const_data_ptr() : nullptr};
}

cuda::Fp8Output output_of(Fp8Matrix& matrix) {
  return {.values = matrix.values.mutable_data_ptr(), .scale = matrix.scale.mutable_data_ptr<float>()};
}

void check_product(const at::Tensor& out, const Fp8Matrix& a, const Fp8Matrix& b, const at::Tensor& bias,
                   const at::Tensor& addend) {
  const auto fits = [&](const at::Tensor& tensor) {
    return !tensor.defined() || (tensor.is_contiguous() && tensor.scalar_type() == out.scalar_type() &&
                                 tensor.device() == out.device());
  };
  TRIREME_CHECK(a.values.size(1) == b.values.size(1) && out.size(0) == a.values.size(0) &&
                    out.size(1) == b.values.size(0) && out.is_contiguous(),
                "[kernels.fp8_matmul] ({}) @ ({})^T into ({}): the sizes do not match",
                fmt::join(a.values.sizes(), ", "), fmt::join(b.values.sizes(), ", "),
                fmt::join(out.sizes(), ", "));
  TRIREME_CHECK(
      fits(bias) && fits(addend) && (!addend.defined() || addend.sizes() == out.sizes()) &&
          (!bias.defined() || bias.numel() == out.size(1)),
      "[kernels.fp8_matmul] bias and addend must be contiguous and of the output's dtype and sizes");
}

/// NaN is the largest. Backward may keep `seen`, which is no reason to refuse it: its version stays.
void raise(const at::Tensor& seen, const at::Tensor& amax) {
  auto& most = *seen.mutable_data_ptr<float>();
  const float value = *amax.const_data_ptr<float>();
  if (std::isnan(value) || value > most) most = value;
}

bool has_blocks(const Fp8Matrix& matrix) {
  return matrix.span == Fp8Span::kRowBlock || matrix.span == Fp8Span::kSquareBlock;
}

}  // namespace

at::Tensor fp8_amax(const at::Tensor& x, Fp8Scaling scaling) {
  const OperatorRange traced("trireme::fp8_amax");
  check_input(x, scaling);
  if (scaling == Fp8Scaling::kBlock) return {};
  const bool by_row = scaling == Fp8Scaling::kRow;
  if (x.is_cuda()) {
    at::Tensor amax = at::zeros({by_row ? x.size(0) + x.size(1) : 1}, x.options().dtype(at::kFloat));
    auto* const out = amax.mutable_data_ptr<float>();
    launched_fp8(by_row ? cuda::fp8_amax_rows(out, out + x.size(0), x.const_data_ptr(), x.size(0), x.size(1),
                                              current_stream())
                        : cuda::fp8_amax(out, x.const_data_ptr(), x.numel(), current_stream()),
                 "fp8_amax");
    return amax;
  }
  const at::Tensor values = x.to(at::kFloat);
  if (!by_row) return amax_of_spans(values, Fp8Span::kTensor);
  return at::cat({amax_of_spans(values, Fp8Span::kRow), amax_of_spans(values.t(), Fp8Span::kRow)});
}

Fp8Source Fp8Source::swiglu(const at::Tensor& gate_up) {
  Fp8Source source(gate_up);
  source.swiglu_ = true;
  return source;
}

Fp8Source Fp8Source::swiglu_gradient(const at::Tensor& gate_up, const at::Tensor& dy) {
  Fp8Source source = swiglu(gate_up);
  source.dy_ = dy;
  return source;
}

at::Tensor Fp8Source::computed() const {
  if (!swiglu_) return x_;
  at::Tensor values = at::empty({rows(), columns()}, x_.options());
  dy_.defined() ? swiglu_backward(values, dy_, x_) : swiglu_forward(values, x_);
  return values;
}

Fp8Copies fp8_cast(const Fp8Source& source, const at::Tensor& amax, const Fp8Cast& cast, Fp8Copy wanted,
                   const at::Tensor& seen) {
  const OperatorRange traced("trireme::fp8_cast");
  check_source(source, cast, seen);
  const bool plain = wanted != Fp8Copy::kTransposed, transposed = wanted != Fp8Copy::kPlain;
  const int64_t rows = source.rows(), columns = source.columns();
  Fp8Copies copies;
  if (source.x().is_cuda()) {
    cuda::Fp8CastCall call = call_of(source, amax, cast, seen);
    if (plain) call.plain = output_of(copies.plain = empty_matrix(source.x(), rows, columns, cast));
    if (transposed)
      call.transposed = output_of(copies.transposed = empty_matrix(source.x(), columns, rows, cast));
    launched_fp8(cuda::fp8_cast(call, current_stream()), "fp8_cast");
    return copies;
  }
  const at::Tensor x = source.computed();
  if (seen.defined()) raise(seen, fp8_amax(x, cast.scaling));
  const auto cast_one = [&](const at::Tensor& matrix, int64_t first) {
    at::Tensor magnitudes = amax;
    if (cast.scaling == Fp8Scaling::kBlock) magnitudes = amax_of_spans(matrix.to(at::kFloat), span_of(cast));
    if (cast.scaling == Fp8Scaling::kRow) magnitudes = amax.narrow(0, first, matrix.size(0));
    return cast_on_cpu(matrix, magnitudes, cast);
  };
  if (plain) copies.plain = cast_one(x, 0);
  if (transposed) copies.transposed = cast_one(x.t().contiguous(), rows);
  return copies;
}

void raise_fp8_amax(at::Tensor& amax, const at::Tensor& x) {
  check_part(x);
  if (!x.is_cuda()) return raise(amax, amax_of_spans(x.to(at::kBFloat16).to(at::kFloat), Fp8Span::kTensor));
  launched_fp8(cuda::fp8_amax_part(amax.mutable_data_ptr<float>(), x.const_data_ptr<float>(), x.numel(),
                                   current_stream()),
               "fp8_amax");
}

void fp8_cast_part(at::Tensor& bytes, const at::Tensor& x, const at::Tensor& amax, const at::Tensor& seen) {
  check_part(x);
  TRIREME_CHECK(bytes.numel() == x.numel() && bytes.is_contiguous() && bytes.scalar_type() == at::kByte,
                "[kernels.fp8] cannot write {} elements to a buffer of {}; it needs as many contiguous bytes",
                x.numel(), bytes.numel());
  if (x.is_cuda()) {
    float* const to_raise = seen.defined() ? seen.mutable_data_ptr<float>() : nullptr;
    launched_fp8(cuda::fp8_cast_part(bytes.mutable_data_ptr(), x.const_data_ptr<float>(),
                                     amax.const_data_ptr<float>(), to_raise, x.numel(), current_stream()),
                 "fp8_cast");
    return;
  }
  const at::Tensor values = x.to(at::kBFloat16);
  if (seen.defined()) raise(seen, amax_of_spans(values.to(at::kFloat), Fp8Span::kTensor));
  bytes.copy_(cast_on_cpu(values.unsqueeze(0), amax, {}).values.view(at::kByte).view({-1}));
}

at::Tensor fp8_scale(const at::Tensor& amax) {
  const at::Tensor counted = at::where(amax < kSmallestAmax, kSmallestAmax, amax).to(at::kFloat);
  return counted / at::full_like(counted, largest(Fp8Format::kE4m3));
}

Fp8Matrix fp8_transposed(const Fp8Matrix& matrix) {
  const at::Tensor& values = matrix.values;
  TRIREME_CHECK(matrix.span == Fp8Span::kTensor,
                "[kernels.fp8] only a matrix with a single scale can be transposed");
  if (!values.is_cuda())
    return {values.view(at::kByte).t().contiguous().view(values.scalar_type()), matrix.scale};
  Fp8Matrix turned{at::empty({values.size(1), values.size(0)}, values.options()), matrix.scale};
  launched_fp8(cuda::fp8_transpose(turned.values.mutable_data_ptr(), values.const_data_ptr(), values.size(0),
                                   values.size(1), current_stream()),
               "fp8_transpose");
  return turned;
}

Fp8Copies fp8_cross_entropy(at::Tensor& loss, at::Tensor& scores, int64_t classes, const at::Tensor& targets,
                            double scale) {
  constexpr Fp8Cast kCast{.scaling = Fp8Scaling::kTensor, .format = Fp8Format::kE5m2};
  check_input(scores, kCast.scaling);
  const at::Tensor amax = at::full({1}, scale, scores.options().dtype(at::kFloat));
  if (!scores.is_cuda()) {
    at::Tensor logits = scores.narrow(1, 0, classes);
    cross_entropy(loss, logits, targets, scale, /*want_gradient=*/true);
    scores.narrow(1, classes, scores.size(1) - classes).zero_();
    return fp8_cast(scores, amax, kCast);
  }
  const int64_t rows = scores.size(0), columns = scores.size(1);
  Fp8Copies copies;
  copies.plain = empty_matrix(scores, rows, columns, kCast);
  copies.plain.scale = amax / largest(kCast.format);
  launched_fp8(cuda::cross_entropy_fp8(loss.mutable_data_ptr<float>(), copies.plain.values.mutable_data_ptr(),
                                       scores.const_data_ptr(), targets.const_data_ptr<int64_t>(), rows,
                                       classes, columns, current_stream()),
               "fp8_cross_entropy");
  copies.transposed = fp8_transposed(copies.plain);
  return copies;
}

at::Tensor dequantized(const Fp8Matrix& matrix) {
  return matrix.values.to(at::kFloat).mul_(spread(matrix.scale, matrix.span, matrix.values.size(1)));
}

void fp8_matmul(at::Tensor& out, const Fp8Matrix& a, const Fp8Matrix& b, bool fast, const at::Tensor& bias,
                const at::Tensor& addend) {
  const OperatorRange traced("trireme::fp8_matmul");
  check_product(out, a, b, bias, addend);
  if (out.is_cuda()) {
    const int64_t k = a.values.size(1);
    return cuda::matmul(
        {.dtype = cuda::Dtype::kBFloat16,
         .out_dtype = out.scalar_type() == at::kFloat ? cuda::Dtype::kFloat : cuda::Dtype::kBFloat16,
         .m = out.size(0),
         .n = out.size(1),
         .k = k,
         .a = {a.values.const_data_ptr(), k, false},
         .b = {b.values.const_data_ptr(), k, true},
         .bias = bias.defined() ? bias.const_data_ptr() : nullptr,
         .addend = addend.defined() ? addend.const_data_ptr() : nullptr,
         .out = out.mutable_data_ptr(),
         .fp8 = cuda::Fp8Operands{.a = {format_of(a.values), a.span},
                                  .b = {format_of(b.values), b.span},
                                  .a_scale = a.scale.const_data_ptr<float>(),
                                  .b_scale = b.scale.const_data_ptr<float>(),
                                  .fast = fast && !has_blocks(a)}});
  }
  at::Tensor sum;
  if (has_blocks(a) || has_blocks(b)) {
    sum = at::mm(dequantized(a), dequantized(b).t());
  } else {
    sum = at::mm(a.values.to(at::kFloat), b.values.to(at::kFloat).t());
    sum.mul_(spread(a.scale, a.span, 0)).mul_(b.span == Fp8Span::kRow ? b.scale.unsqueeze(0) : b.scale);
  }
  if (bias.defined()) sum.add_(bias);
  if (addend.defined()) sum.add_(addend);
  out.copy_(sum);
}

std::string fp8_lack(const at::Device& device, Fp8Scaling scaling) {
  if (!device.is_cuda()) return "FP8 matrix multiplication needs a GPU";
  const GpuInfo gpu = gpus().at(static_cast<size_t>(device.index()));
  const int capability = 10 * gpu.major + gpu.minor;
  constexpr int kAda = 89, kHopper = 90;
  const bool any = scaling == Fp8Scaling::kTensor;
  if (any ? capability >= kAda : capability == kHopper) return {};
  return fmt::format("{} has compute capability {}.{}, but cuBLASLt supports FP8 with {}", gpu.name,
                     gpu.major, gpu.minor,
                     any ? "a scale per tensor from 8.9 only" : "a scale per row or block on 9.0 only");
}

}  // namespace trireme::kernels
