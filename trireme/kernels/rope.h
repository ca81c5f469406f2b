#pragma once
// Rotary position embedding (Su et al. 2021) in the half-rotation order of Hugging Face Llama checkpoints.
#include <cstdint>

namespace trireme::kernels {

/// Rotates the first `heads` heads of each row in place. x (rows, stride) holds heads of `head_dim` one after
/// the other; row r has position r % seq_len. cosine and sine are (seq_len, head_dim / 2). `direction` 1
/// rotates, -1 turns back, which is the backward pass.
template <typename Scalar>
void rope_inplace(Scalar* x, const float* cosine, const float* sine, int64_t rows, int64_t seq_len,
                  int64_t stride, int64_t heads, int64_t head_dim, float direction);

}  // namespace trireme::kernels
