#include "trireme/kernels/tensor_ops.h"
#include "trireme/optim/optimizer.h"

namespace trireme::optim {
namespace {

class Sgd : public Optimizer {
 public:
  Sgd(const plan::OptimConfig& config, std::vector<FlatParam> params)
      : config_(config), params_(std::move(params)) {
    for (const FlatParam& param : params_) buffers_.push_back(at::zeros_like(param.master));
  }

  void begin_step() override { first_ = steps_++ == 0; }
  size_t size() const override { return params_.size(); }
  void update(size_t i, double lr, const GradScale& grad_scale) override {
    const FlatParam& param = params_[i];
    for (const Segment& segment : param.segments) {
      at::Tensor master = part_of(param.master, segment), copy = part_of(param.copy, segment);
      at::Tensor buffer = part_of(buffers_[i], segment);
      const double decay = segment.decay ? config_.weight_decay : 0.0;
      kernels::sgd(master, buffer, part_of(param.grad, segment), copy,
                   {static_cast<float>(lr), static_cast<float>(config_.momentum), static_cast<float>(decay),
                    static_cast<float>(grad_scale.host), first_},
                   grad_scale.device);
    }
  }

  int64_t state_bytes() const override {
    int64_t bytes = 0;
    for (const at::Tensor& buffer : buffers_) bytes += buffer.nbytes();
    return bytes;
  }

 private:
  plan::OptimConfig config_;
  std::vector<FlatParam> params_;
  std::vector<at::Tensor> buffers_;
  int64_t steps_ = 0;
  bool first_ = true;
};

}  // namespace

std::unique_ptr<Optimizer> make_sgd(const plan::OptimConfig& config, std::vector<FlatParam> params) {
  return std::make_unique<Sgd>(config, std::move(params));
}

}  // namespace trireme::optim
