#pragma once
// The ordered reduction's checks and its local sum, whatever has brought the rows of the other ranks.
// Internal to this room.
#include <cstdint>

#include "trireme/comm/checks.h"

namespace trireme::comm {

/// output (m) fp32, input (n*m) fp32 or bf16, both on the group's device; else LogicError.
void check_ordered(const Call& call, const at::Tensor& output, const at::Tensor& input);

/// output (m) fp32 = the tree sum of rows (n*m); see kernels/tree_sum.h. On a GPU on its current stream.
void tree_sum(at::Tensor& output, const at::Tensor& rows, int64_t ranks);

/// The GPU's part of it: gpu_tree_sum.cpp, or no_nccl.cpp in a build without CUDA.
void tree_sum_on_gpu(at::Tensor& output, const at::Tensor& rows, int64_t ranks);

}  // namespace trireme::comm
