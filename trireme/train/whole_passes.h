#pragma once
// The passes of a model in one piece: batches are fetched as they run, and ranks agree on no step.
#include "trireme/train/model_passes.h"
#include "trireme/train/passes.h"

namespace trireme::train {

class WholePasses : public ModelPasses {
 public:
  /// Adds the model as the one stage to `stages`, which must outlive this, as `history`, that of FP8's
  /// delayed scales, must; null: there are none. Collective. Throws as parallel::DataParallel.
  WholePasses(const ModelSetup& setup, const nn::Fp8History* history, std::vector<TrainedStage>& stages);

  at::Tensor run(const std::function<data::Batch()>& next, double scale) override {
    return passes_->run(next, scale);
  }
  int64_t batches_at_once() const override { return 1; }
  Scores evaluate(const std::vector<data::Batch>& batches, const std::vector<Metric>& metrics,
                  Guesses* guesses) override;
  at::Tensor infer(const at::Tensor& inputs,
                   const std::function<at::Tensor(const at::Tensor& logits)>& last) override;
  void measure_activations(bool on) override { passes_->measure_activations(on); }
  int64_t activation_bytes() const override { return passes_->activation_bytes(); }
  int64_t recorded() const override { return passes_->recorded(); }

 private:
  std::shared_ptr<nn::Model> model_;
  c10::Device device_;
  bool reads_images_;
  bool counts_;  ///< the scores of its rows, which ranks along tp have alike
  std::optional<Passes> passes_;
};

}  // namespace trireme::train
