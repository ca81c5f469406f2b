#include "trireme/nn/top_k.h"

#include <ATen/ATen.h>

namespace trireme::nn {

at::Tensor top_k_hits(const at::Tensor& logits, const at::Tensor& targets, int64_t k) {
  const at::Tensor target = targets.unsqueeze(1);     // (B, 1)
  const at::Tensor value = logits.gather(1, target);  // (B, 1)
  const at::Tensor classes = at::arange(logits.size(1), target.options());
  const at::Tensor ahead = (logits <= value).logical_not_();  // larger, or NaN on either side
  const at::Tensor ties = (logits == value).logical_and_(classes < target);
  return (ahead.sum(1) + ties.sum(1) < k).sum();
}

}  // namespace trireme::nn
