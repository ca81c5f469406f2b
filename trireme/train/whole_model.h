#pragma once
// A model in one piece on every rank: data parallelism alone.
#include "trireme/nn/model.h"
#include "trireme/train/passes.h"
#include "trireme/train/trained_model.h"

namespace trireme::train {

class WholeModel : public TrainedModel {
 public:
  explicit WholeModel(const ModelSetup& setup);
  ~WholeModel() override;

  at::Tensor run_passes(const std::function<data::Batch()>& next, double scale) override;
  at::Tensor grad_squares() const override;
  at::Tensor sum_over_ranks(const at::Tensor& squares) const override;
  double sum_over_ranks(const std::vector<std::vector<double>>& squares) const override;
  at::Tensor unit_grad_squares() const override { return engine().unit_grad_squares(); }
  const std::vector<std::string>& units() const override { return units_; }
  int64_t sent_bytes() const override { return engine().sent_bytes(); }
  void measure_activations(bool on) override { passes_->measure_activations(on); }
  int64_t activation_bytes() const override { return passes_->activation_bytes(); }
  int64_t recorded_passes() const override { return passes_->recorded(); }
  void sync_buffers() override;
  int64_t batches_at_once() const override { return 1; }
  Scores evaluate(const std::vector<data::Batch>& batches, Guesses* guesses) override;
  std::vector<int32_t> generate(std::vector<int32_t> prompt, const SamplingOptions& options) override;
  void save_weights(const std::string& path, const parallel::Notes& notes) override;
  std::string base_digest() override;
  std::string weights_digest() override;

 private:
  AdaptedModel adapted() override;
  parallel::DataParallel& engine() const { return *parts_.front().engine; }

  std::shared_ptr<nn::Model> model_;
  comm::Mesh mesh_;
  const plan::Config& config_;
  const plan::ModelFacts& facts_;
  c10::Device device_;
  bool reads_images_;
  std::vector<std::string> units_;
  std::unique_ptr<Passes> passes_;
};

}  // namespace trireme::train
