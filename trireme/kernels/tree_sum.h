#pragma once
// The sum over ranks with one fixed order of additions, so that every policy and every backend gives the same
// bits. sum(first row .. last row) = sum(left) + sum(right), where left takes the largest power of two rows
// below the count. Rows of contiguous groups whose size is a power of two are therefore whole subtrees:
// summing inside such groups first and over the groups afterwards gives the same bits as summing all at once.
#include <cstdint>
#include <span>

namespace trireme::kernels {

/// out[i] = sum over r of rows[r][i], in fp32. `out` (count) may be none of the rows (count) each.
void tree_sum(float* out, std::span<const float* const> rows, int64_t count);

/// As tree_sum(), with rows of bf16 bits, widened to fp32 before the first addition.
void tree_sum_bf16(float* out, std::span<const uint16_t* const> rows, int64_t count);

/// The sums on a GPU: rows (ranks, count) contiguous, enqueued on `stream` (a cudaStream_t). Only in builds
/// with CUDA. Returns the launch's cudaError_t, 0 when it was accepted.
int tree_sum_cuda(float* out, const float* rows, int64_t ranks, int64_t count, void* stream);
int tree_sum_bf16_cuda(float* out, const uint16_t* rows, int64_t ranks, int64_t count, void* stream);

}  // namespace trireme::kernels
