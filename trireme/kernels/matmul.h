#pragma once
// Matrix products of two-dimensional tensors into memory that is there. Nothing here is differentiable.
#include <ATen/core/Tensor.h>

namespace trireme::kernels {

/// out (m, n) = a (m, k) @ b (k, n) + bias (n) + addend (m, n), undefined ones left out. out and addend are
/// contiguous, and addend may be out itself; a and b may be transposed views. One device and one dtype, but
/// out and addend may be fp32 where there is no bias. On a GPU enqueued on the current stream; products of
/// bf16 and fp16 are summed in fp32, and rounded to their dtype before they are added to fp32 on a CPU alone.
/// Throws LogicError when sizes, dtypes or devices do not fit.
void matmul(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {},
            const at::Tensor& addend = {});

/// The result of matmul() as a new tensor.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const at::Tensor& bias = {},
                   const at::Tensor& addend = {});

/// Whether this processor has instructions for products of bf16 (AVX512-BF16 or AMX). Without them such
/// products are slower than those of fp32. Always true on processors other than x86-64, about which torch
/// says nothing.
bool cpu_multiplies_bf16();

/// Switches tuning on or off while it lives; without one it is on. With tuning, the first product of each
/// large shape on a GPU tries the algorithms that cuBLASLt proposes, and keeps the fastest of those that give
/// the same bits as the first proposal. Without, and for shapes after the first few hundred, the first
/// proposal is used. For the whole process. A change forgets what was chosen.
class MatmulTuning {
 public:
  explicit MatmulTuning(bool on);
  ~MatmulTuning();
  MatmulTuning(const MatmulTuning&) = delete;
  MatmulTuning& operator=(const MatmulTuning&) = delete;

 private:
  bool before_;
};

}  // namespace trireme::kernels
