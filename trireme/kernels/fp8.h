#pragma once
// Matrices of eight-bit floats with scales, cast from bf16, and their products. Nothing here is
// differentiable. On a GPU everything is enqueued on the current stream, and no scale visits the host. On a
// CPU values and scales have the bits that a GPU computes; products are those of the same values, summed in
// fp32.
#include <ATen/core/Tensor.h>

#include <string>

#include "trireme/kernels/fp8_format.h"

namespace trireme::kernels {

/// Which elements share a scale: all of a tensor; a row of what is multiplied; blocks, 1 x 128 of activations
/// and their gradients, 128 x 128 of weights (DeepSeek-AI 2024, DeepSeek-V3, section 3.3).
enum class Fp8Scaling { kTensor, kRow, kBlock };

/// values * scale, the scale of each element's span.
struct Fp8Matrix {
  at::Tensor values;  ///< (rows, columns) float8_e4m3fn or float8_e5m2, contiguous
  /// fp32: kTensor (1); kRow (rows); kRowBlock (columns / 128, rows);
  /// kSquareBlock (rows / 128, columns / 128 rounded up to a multiple of 4), of which the rest is unused
  at::Tensor scale;
  Fp8Span span = Fp8Span::kTensor;

  bool defined() const { return values.defined(); }
};

/// A matrix (rows, columns) and its transposed copy (columns, rows); one that nobody asked for is undefined.
/// On Hopper both operands of a product must lie along its inner dimension.
struct Fp8Copies {
  Fp8Matrix plain, transposed;
};

enum class Fp8Copy { kPlain, kTransposed, kBoth };

/// What decides a cast beside the values.
struct Fp8Cast {
  Fp8Scaling scaling = Fp8Scaling::kTensor;
  Fp8Format format = Fp8Format::kE4m3;
  bool weight = false;  ///< kBlock: square blocks
};

/// The largest magnitudes in x (rows, columns) bf16, as fp8_cast() takes them, fp32: (1) for kTensor; those
/// of all rows, then those of all columns for kRow; undefined for kBlock. NaN where there is one.
at::Tensor fp8_amax(const at::Tensor& x, Fp8Scaling scaling);

/// What is cast, (rows, columns): a matrix, or one that a GPU computes on the way, rounded to bf16, so that
/// it never is in memory. bf16, contiguous.
class Fp8Source {
 public:
  Fp8Source(const at::Tensor& x) : x_(x) {}  // NOLINT(google-explicit-constructor): most sources are matrices
  /// SwiGLU of gate_up (rows, 2 * columns), as swiglu_forward() has it.
  static Fp8Source swiglu(const at::Tensor& gate_up);
  /// Its gradient, for gate_up (rows, columns) and dy (rows, columns / 2), as swiglu_backward() has it.
  static Fp8Source swiglu_gradient(const at::Tensor& gate_up, const at::Tensor& dy);

  int64_t rows() const { return x_.size(0); }
  int64_t columns() const { return is_swiglu() && !dy_.defined() ? x_.size(1) / 2 : x_.size(1); }
  bool is_swiglu() const { return swiglu_; }
  const at::Tensor& x() const { return x_; }    ///< or gate_up
  const at::Tensor& dy() const { return dy_; }  ///< undefined without
  /// In memory.
  at::Tensor computed() const;

 private:
  at::Tensor x_, dy_;
  bool swiglu_ = false;
};

/// Casts: values / scale rounded to nearest even, the largest magnitude of a span at the end of the format's
/// range. A span with NaN or an infinity becomes NaN. With `seen`, (1) fp32 and for kTensor alone, amax is
/// not of these values: those beyond it become the largest of the format, those that are not finite NaN, with
/// some beside them on a GPU, and `seen` is raised to the largest magnitude. SwiGLU is for kBlock and `seen`.
/// Throws LogicError when a size is not a multiple of fp8_multiple().
Fp8Copies fp8_cast(const Fp8Source& source, const at::Tensor& amax, const Fp8Cast& cast,
                   Fp8Copy wanted = Fp8Copy::kBoth, const at::Tensor& seen = {});

// Weights of which a rank keeps a part, fp32: a range (n) of a matrix that has one scale, n a multiple of 8.
// They become the bytes that fp8_cast() makes of the whole matrix in bf16.

/// amax (1) fp32 is raised to the largest magnitude of x rounded to bf16; NaN where there is one.
void raise_fp8_amax(at::Tensor& amax, const at::Tensor& x);
/// bytes (n) uint8, of e4m3. amax and `seen` as fp8_cast() has them.
void fp8_cast_part(at::Tensor& bytes, const at::Tensor& x, const at::Tensor& amax,
                   const at::Tensor& seen = {});
/// The scales of what is cast to e4m3 by `amax`, of its sizes.
at::Tensor fp8_scale(const at::Tensor& amax);

/// Copied; of matrices with one scale.
Fp8Matrix fp8_transposed(const Fp8Matrix& matrix);

/// loss (rows) fp32 of bf16 logits in the first `classes` columns of scores (rows, columns), contiguous, and
/// the gradients `scale` * (softmax - onehot) in e5m2 with one scale, for which `scale` is the largest
/// magnitude; columns beyond have none. As cross_entropy() of tensor_ops.h otherwise. What scores hold
/// afterwards is not defined. Sizes as fp8_cast() wants them.
Fp8Copies fp8_cross_entropy(at::Tensor& loss, at::Tensor& scores, int64_t classes, const at::Tensor& targets,
                            double scale);

/// Sizes of what is cast are multiples of this: 16, and 128 for kBlock.
constexpr int64_t fp8_multiple(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::kBlock ? kFp8Block : 16;
}

/// fp32, (rows, columns).
at::Tensor dequantized(const Fp8Matrix& matrix);

/// out (m, n) = a (m, k) @ b (n, k)^T + bias (n) + addend (m, n), undefined ones left out; out bf16 or,
/// without a bias, fp32, and addend of its dtype, which may be out itself. `fast`: on Hopper partial sums
/// keep 14 bits for the whole of k instead of being added in fp32 every 128 elements; blocks never do.
void fp8_matmul(at::Tensor& out, const Fp8Matrix& a, const Fp8Matrix& b, bool fast,
                const at::Tensor& bias = {}, const at::Tensor& addend = {});

/// Why `device` multiplies no matrices with such scales in hardware; empty: it does. A CPU never does, but
/// fp8_matmul() computes the same there.
std::string fp8_lack(const at::Device& device, Fp8Scaling scaling);

}  // namespace trireme::kernels
