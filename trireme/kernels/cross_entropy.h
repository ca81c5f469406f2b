#pragma once
// Softmax cross-entropy, loss and gradient in one pass over the logits.
#include <cstdint>

namespace trireme::kernels {

/// The target of rows that have no loss, as in torch.
inline constexpr int64_t kIgnoredTarget = -100;

/// loss (rows) = log(sum exp(logits)) - logits[target], in nats. When `want_gradient`, logits (rows, classes)
/// are replaced by d loss / d logits = softmax - onehot(target), unscaled. Rows whose target is
/// kIgnoredTarget have loss and gradient zero. Throws DataError, before anything is written, for other
/// targets that are no class.
template <typename Scalar>
void cross_entropy(float* loss, Scalar* logits, const int64_t* targets, int64_t rows, int64_t classes,
                   bool want_gradient);

}  // namespace trireme::kernels
