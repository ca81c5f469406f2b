#pragma once
// Matrices of eight-bit floats with scales, cast from bf16, and their products. Nothing here is
// differentiable. On a GPU everything is enqueued on the current stream, and no scale visits the host. On a
// CPU values and scales have the bits that a GPU computes; products are those of the same values, summed in
// fp32.
#include <ATen/core/Tensor.h>

#include <string>

#include "trireme/kernels/fp8_format.h"

namespace trireme::kernels {

/// Which elements share a scale: all of a tensor; a row of an operand; blocks, 1 x 128 of activations and
/// their gradients, 128 x 128 of weights (DeepSeek-AI 2024, DeepSeek-V3, section 3.3).
enum class Fp8Scaling { kTensor, kRow, kBlock };

/// A matrix in FP8: each element is its value times the scale of its span.
struct Fp8Matrix {
  at::Tensor values;  ///< (rows, columns) float8_e4m3fn or float8_e5m2, contiguous
  /// fp32: kTensor (1); kRow (rows); kRowBlock (columns / 128, rows);
  /// kSquareBlock (rows / 128, columns / 128 rounded up to a multiple of 4), of which the rest is unused
  at::Tensor scale;
  Fp8Span span = Fp8Span::kTensor;

  bool defined() const { return values.defined(); }
};

/// A matrix (rows, columns) and its transposed copy (columns, rows); a copy that was not asked for is
/// undefined. On Hopper both operands of a product must lie along its inner dimension.
struct Fp8Copies {
  Fp8Matrix plain, transposed;
};

enum class Fp8Copy { kPlain, kTransposed, kBoth };

/// How a matrix is cast.
struct Fp8Cast {
  Fp8Scaling scaling = Fp8Scaling::kTensor;
  Fp8Format format = Fp8Format::kE4m3;
  bool weight = false;  ///< kBlock: square blocks
};

/// The largest magnitudes in x (rows, columns) bf16, as fp8_cast() takes them, fp32: for kTensor (1); for
/// kRow (rows + columns), those of all rows, then those of all columns; for kBlock undefined. NaN where x has
/// one.
at::Tensor fp8_amax(const at::Tensor& x, Fp8Scaling scaling);

/// The input of a cast, (rows, columns) bf16, contiguous: a matrix in memory, or one that a GPU computes
/// during the cast, rounds to bf16 and never stores.
class Fp8Source {
 public:
  Fp8Source(const at::Tensor& x) : x_(x) {}  // NOLINT(google-explicit-constructor): most sources are matrices
  /// SwiGLU of gate_up (rows, 2 * columns), as swiglu_forward() has it.
  static Fp8Source swiglu(const at::Tensor& gate_up);
  /// The gradient of swiglu(), for gate_up (rows, columns) and dy (rows, columns / 2), as swiglu_backward()
  /// has it.
  static Fp8Source swiglu_gradient(const at::Tensor& gate_up, const at::Tensor& dy);

  int64_t rows() const { return x_.size(0); }
  int64_t columns() const { return is_swiglu() && !dy_.defined() ? x_.size(1) / 2 : x_.size(1); }
  bool is_swiglu() const { return swiglu_; }
  const at::Tensor& x() const { return x_; }    ///< the matrix, or gate_up
  const at::Tensor& dy() const { return dy_; }  ///< undefined unless a gradient is cast
  /// The matrix in memory: x(), or SwiGLU or its gradient, computed now.
  at::Tensor computed() const;

 private:
  at::Tensor x_, dy_;
  bool swiglu_ = false;
};

/// Casts to values / scale, rounded to nearest even, with scales that put the largest magnitude of a span at
/// the end of the format's range. A span with NaN or an infinity becomes NaN. `seen`, (1) fp32 and for
/// kTensor alone, says that amax comes from other values: values beyond it become the largest of the format,
/// values that are not finite become NaN, on a GPU with some of their neighbours, and `seen` is raised to the
/// largest magnitude. SwiGLU can be cast with `seen` or, by blocks of rows, with kBlock. Throws LogicError
/// for other combinations, and when a size is not a multiple of fp8_multiple().
Fp8Copies fp8_cast(const Fp8Source& source, const at::Tensor& amax, const Fp8Cast& cast,
                   Fp8Copy wanted = Fp8Copy::kBoth, const at::Tensor& seen = {});

// Weights of which a rank keeps a part: x (n) fp32, a range of a matrix with one scale, n a multiple of 8.
// They become the bytes that fp8_cast() would make of the whole matrix in bf16.

/// Raises amax (1) fp32 to the largest magnitude of x rounded to bf16; NaN where there is one.
void raise_fp8_amax(at::Tensor& amax, const at::Tensor& x);
/// Casts x to e4m3 in bytes (n) uint8. amax and `seen` as fp8_cast() takes them.
void fp8_cast_part(at::Tensor& bytes, const at::Tensor& x, const at::Tensor& amax,
                   const at::Tensor& seen = {});
/// The scales of casts to e4m3 by `amax`, fp32 of the shape of `amax`.
at::Tensor fp8_scale(const at::Tensor& amax);

/// A transposed copy. Throws LogicError unless the matrix has one scale.
Fp8Matrix fp8_transposed(const Fp8Matrix& matrix);

/// Computes loss (rows) fp32 from bf16 logits in the first `classes` columns of scores (rows, columns),
/// contiguous. Returns the gradients `scale` * (softmax - onehot) in e5m2 with one scale, for `scale` as the
/// largest magnitude; they are zero in the columns beyond. Otherwise as cross_entropy() of tensor_ops.h.
/// Leaves scores undefined. Sizes as for fp8_cast().
Fp8Copies fp8_cross_entropy(at::Tensor& loss, at::Tensor& scores, int64_t classes, const at::Tensor& targets,
                            double scale);

/// Rows and columns of a matrix that is cast are multiples of this: 16, and 128 for kBlock.
constexpr int64_t fp8_multiple(Fp8Scaling scaling) {
  return scaling == Fp8Scaling::kBlock ? kFp8Block : 16;
}

/// The matrix as fp32 (rows, columns).
at::Tensor dequantized(const Fp8Matrix& matrix);

/// out (m, n) = a (m, k) @ b (n, k)^T + bias (n) + addend (m, n), undefined ones left out; out bf16 or,
/// without a bias, fp32, and addend of its dtype, which may be out itself. `fast`: on Hopper partial sums
/// keep 14 bits for the whole of k instead of being added in fp32 every 128 elements; blocks never do.
void fp8_matmul(at::Tensor& out, const Fp8Matrix& a, const Fp8Matrix& b, bool fast,
                const at::Tensor& bias = {}, const at::Tensor& addend = {});

/// Why `device` has no hardware to multiply matrices with such scales; empty: it has. A CPU never does, but
/// fp8_matmul() computes the same there.
std::string fp8_lack(const at::Device& device, Fp8Scaling scaling);

}  // namespace trireme::kernels
