#pragma once
// The numbers that optimizers keep of the elements of a flat range, as tensors in one of the formats of
// moment_format.h. Not differentiable; on a GPU everything is enqueued on the current stream.
#include <ATen/core/Tensor.h>

#include <vector>

#include "trireme/kernels/moment_format.h"

namespace trireme::kernels {

/// One number for each element of a range.
class Moment {
 public:
  /// Zeros.
  Moment(int64_t count, MomentFormat format, MomentKind kind, at::Device device);
  /// The numbers that `values` (count) fp32, contiguous, has: its memory, no copy.
  static Moment in(const at::Tensor& values, MomentKind kind);

  /// The elements from `begin` to `end`, no copy; begin is a multiple of kMomentBlock, but for kFp32.
  Moment part(int64_t begin, int64_t end) const;

  /// (count) fp32: the memory itself for kFp32, else a copy.
  at::Tensor read() const;
  /// Stores values (count) fp32, each rounded to the nearest number of the format; values from read() are
  /// stored exactly.
  void write(const at::Tensor& values) const;

  MomentFormat format() const { return format_; }
  const at::Tensor& values() const { return values_; }        ///< (count) fp32, bf16 or int8
  const at::Tensor& exponents() const { return exponents_; }  ///< kInt8: (blocks) uint8
  int64_t bytes() const;

 private:
  Moment(MomentFormat format, MomentKind kind, at::Tensor values, at::Tensor exponents);

  MomentFormat format_;
  MomentKind kind_;
  at::Tensor values_, exponents_;
};

/// All numbers of a range, and how they are rounded; key and first_block as in optimizer.h.
struct MomentsOfRange {
  std::vector<Moment> numbers;
  uint64_t key = 0;
  int64_t first_block = 0;
};

}  // namespace trireme::kernels
