#pragma once
// Numbers in NF4 (base/nf4_format.h): the values, codes and magnitudes are those of bitsandbytes. The first
// of two numbers has the upper half of their byte. A block lies in memory with its magnitude behind its
// codes, so that any blocks of a tensor are one piece of it. A GPU encodes by operators of ATen and decodes
// in one kernel, on the current stream, and never visits the host. Finite numbers have the same bits on a
// CPU and a GPU.
#include <ATen/core/Tensor.h>

#include "trireme/base/nf4_format.h"

namespace trireme::kernels {

/// Encodes `values` (n) fp32 to `blocks` (n / 64 rounded up, kNf4Bytes) uint8, both contiguous. A number gets
/// the nearest value; of two that are equally near, the lower one. Where the last block has fewer than 64
/// numbers, zeros follow. A block with NaN or an infinity decodes to numbers that are not finite. Throws
/// LogicError for other sizes or dtypes.
void nf4_encode(at::Tensor& blocks, const at::Tensor& values);
/// Decodes `blocks` to `out` (n), in fp32 and rounded to the dtype of `out`, which is fp32, bf16 or fp16.
void nf4_decode(at::Tensor& out, const at::Tensor& blocks);

/// nf4_encode() by operators of ATen, on any device, a piece of the numbers at a time.
void nf4_encode_by_operators(at::Tensor& blocks, const at::Tensor& values);

/// The codes of blocks, (blocks, 32) uint8, and their largest magnitudes, (blocks) fp32; both are views.
at::Tensor nf4_codes(const at::Tensor& blocks);
at::Tensor nf4_magnitudes(const at::Tensor& blocks);

}  // namespace trireme::kernels
