#include "trireme/kernels/optimizer.h"
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
  void update(size_t i, double lr, double grad_scale) override {
    for (const Segment& segment : params_[i].segments) {
      const double decay = segment.decay ? config_.weight_decay : 0.0;
      params_[i].master.is_cuda() ? step_gpu(params_[i], buffers_[i], segment, lr, decay, grad_scale)
                                  : step_cpu(params_[i], buffers_[i], segment, lr, decay, grad_scale);
    }
  }

  int64_t state_bytes() const override {
    int64_t bytes = 0;
    for (const at::Tensor& buffer : buffers_) bytes += buffer.nbytes();
    return bytes;
  }

 private:
  void step_cpu(const FlatParam& param, const at::Tensor& buffer, const Segment& segment, double lr,
                double decay, double grad_scale) const {
    const int64_t first = segment.range.begin;
    kernels::sgd(param.master.data_ptr<float>() + first, buffer.data_ptr<float>() + first,
                 param.grad.data_ptr<float>() + first,
                 param.copy.defined() ? param.copy.data_ptr<c10::BFloat16>() + first : nullptr,
                 segment.range.size(),
                 {static_cast<float>(lr), static_cast<float>(config_.momentum), static_cast<float>(decay),
                  static_cast<float>(grad_scale), first_});
  }

  void step_gpu(const FlatParam& param, const at::Tensor& buffer, const Segment& segment, double lr,
                double decay, double grad_scale) const {
    const auto part = [&](const at::Tensor& whole) {
      return whole.narrow(0, segment.range.begin, segment.range.size());
    };
    at::Tensor master = part(param.master);
    at::Tensor momentum = part(buffer);
    momentum.mul_(first_ ? 0.0 : config_.momentum).add_(part(param.grad), grad_scale).add_(master, decay);
    master.add_(momentum, -lr);
    if (param.copy.defined()) part(param.copy).copy_(master);
  }

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
