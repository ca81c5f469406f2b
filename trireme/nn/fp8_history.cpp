#include "trireme/nn/fp8_history.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::nn {
namespace {

constexpr int64_t kOfBlock = kBlockLayers * Fp8Layer::kMagnitudes;

}  // namespace

Fp8History::Fp8History(int64_t blocks, int64_t steps, at::Device device) {
  TRIREME_CHECK(blocks > 0 && steps > 0, "[nn.fp8_history] {} blocks and {} steps; both must be at least 1",
                blocks, steps);
  const auto options = at::TensorOptions().device(device).dtype(at::kFloat);
  const int64_t layers = blocks * kOfBlock;
  rows_ = at::zeros({steps, layers}, options);
  amax_ = at::zeros({layers}, options);
  seen_ = at::zeros({layers}, options);
}

Fp8Recipe Fp8History::of_block(Fp8Recipe recipe, int64_t block) const {
  recipe.layer.seen = seen_.narrow(0, block * kOfBlock, kOfBlock);
  if (known_ > 0) recipe.layer.amax = amax_.narrow(0, block * kOfBlock, kOfBlock);
  return recipe;
}

at::Tensor Fp8History::seen() const {
  return seen_.view(at::kInt);
}

void Fp8History::end_step() {
  const at::NoGradGuard no_grad;
  const at::Tensor before = rows_.select(0, newest_);
  const at::Tensor row = at::where(seen_.isfinite().logical_and_(seen_ > 0), seen_, before);
  newest_ = known_ == 0 ? 0 : (newest_ + 1) % rows_.size(0);
  rows_.select(0, newest_).copy_(row);
  amax_.copy_(rows_.amax(0));
  seen_.zero_();
  ++known_;
}

at::Tensor Fp8History::saved() const {
  const at::Tensor newest_last = rows_.roll(rows_.size(0) - 1 - newest_, 0);
  return newest_last.flip(0).narrow(0, 0, std::min(known_, rows_.size(0))).cpu().contiguous();
}

bool Fp8History::restore(const at::Tensor& saved, const std::function<bool(int64_t block)>& blocks) {
  const at::NoGradGuard no_grad;
  if (saved.dim() != 2 || saved.size(0) == 0 || saved.size(1) != rows_.size(1)) return false;
  const int64_t steps = std::min(saved.size(0), rows_.size(0));
  const at::Tensor newest = saved.narrow(0, 0, steps), known = newest.amax(0) > 0;
  for (int64_t block = 0; block < known.numel() / kOfBlock; ++block) {
    if (blocks(block) && !known.narrow(0, block * kOfBlock, kOfBlock).all().item<bool>()) return false;
  }
  rows_.zero_();
  rows_.narrow(0, 0, steps).copy_(newest.flip(0));
  amax_.copy_(rows_.amax(0));
  seen_.zero_();
  known_ = steps;
  newest_ = steps - 1;
  return true;
}

}  // namespace trireme::nn
