#pragma once
// Softmax cross-entropy, loss and gradient in one pass over the logits.
#include <cstdint>

namespace trireme::kernels {

/// loss (rows) = log(sum exp(logits)) - logits[target], in nats. When `want_gradient`, logits (rows, classes)
/// are replaced by d loss / d logits = softmax - onehot(target), unscaled. Rows with a negative target have
/// loss and gradient zero.
template <typename Scalar>
void cross_entropy(float* loss, Scalar* logits, const int64_t* targets, int64_t rows, int64_t classes,
                   bool want_gradient);

}  // namespace trireme::kernels
