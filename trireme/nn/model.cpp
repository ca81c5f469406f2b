#include "trireme/nn/model.h"

namespace trireme::nn {

at::Tensor Model::run(std::span<const Unit> units, at::Tensor x) const {
  bool begins_pass = true;
  for (const Unit& unit : units) {
    const bool announced = runner_ && unit.has_parameters;
    x = announced ? runner_(unit, x, begins_pass) : unit.forward(x);
    begins_pass = begins_pass && !announced;
  }
  return x;
}

BlockOptions Model::block_options(size_t block, const Documents& documents, Output output,
                                  KeptAttention* attention) const {
  BlockOptions options{
      .output = output, .attention = attention, .joint = joint_, .context = context_, .documents = documents};
  options.recompute_cheap = cheap_every_ > 0 && block % static_cast<size_t>(cheap_every_) == 0;
  const auto index = static_cast<int64_t>(block);
  if (!is_training() || !fp8_ || !fp8_blocks_(index)) return options;
  options.fp8 = fp8_history_ != nullptr ? fp8_history_->of_block(*fp8_, index) : fp8_;
  return options;
}

}  // namespace trireme::nn
