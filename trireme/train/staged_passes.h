#pragma once
// The passes of a model in the stages of a pipeline, with data parallelism inside the stages.
#include <memory>
#include <optional>
#include <vector>

#include "trireme/nn/init.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/pipeline.h"
#include "trireme/train/model_passes.h"
#include "trireme/train/model_stage.h"

namespace trireme::train {

class StagedPasses : public ModelPasses {
 public:
  /// Adds this rank's stages of `plan` to `stages`, in their order. These must outlive this, as `plan` and
  /// `history` must: the last as WholePasses has it. Collective. Throws as parallel::DataParallel and
  /// parallel::Pipeline.
  StagedPasses(const ModelSetup& setup, const plan::PipelinePlan& plan, const nn::Fp8History* history,
               std::vector<TrainedStage>& stages);

  at::Tensor run(const std::function<data::Batch()>& next, double scale) override;
  int64_t batches_at_once() const override { return plan_.schedule.micro_batches; }
  /// Without metrics, which check_program() refuses.
  Scores evaluate(const std::vector<data::Batch>& batches, const std::vector<Metric>& metrics,
                  Guesses* guesses) override;
  at::Tensor infer(const at::Tensor& inputs,
                   const std::function<at::Tensor(const at::Tensor& logits)>& last) override;
  int64_t sent_bytes() override;
  void report_steps(bool on) override { pipeline_->record(on); }
  std::optional<plan::PipelineReport> step_report() override { return pipeline_->report(); }

 private:
  parallel::Stage make_stage(const ModelSetup& setup, int64_t stage, const comm::Mesh& engine_mesh,
                             const nn::InitialWeights& initial, const nn::Fp8History* history);
  parallel::StageLoss loss_function();
  std::function<nn::VocabularyPart(const at::Tensor&, const at::Tensor&)> head_part_function() const;
  /// Keeps the documents of the micro-batches that come next, which all stages of this rank read.
  void take_documents(const std::vector<data::Batch>& batches);
  at::Tensor on_device(const at::Tensor& tensor) const;
  Scores evaluate_images(const std::vector<data::Batch>& batches, Guesses* guesses);
  void count(const at::Tensor& logits, const at::Tensor& targets);
  /// (rows of this rank's part) logits -> (V) of all parts. Collective over the pipeline.
  at::Tensor joined_logits(const at::Tensor& mine) const;

  const plan::Config& config_;
  const comm::Mesh& mesh_;
  int64_t micro_batch_;
  const plan::PipelinePlan& plan_;
  std::shared_ptr<ModelStage> last_;       ///< with the head; null: this rank lacks it
  std::shared_ptr<ModelStage> head_part_;  ///< of a head that is spread; null: it is not
  std::unique_ptr<parallel::Pipeline> pipeline_;
  std::vector<nn::Documents> documents_;  ///< of the micro-batches that are given next
  double scale_ = 1.0;                    ///< of the gradients of the step under way
  /// Counts of the images that are evaluated now; none in training.
  struct Counting {
    Scores scores;
    Guesses* guesses;
  };
  std::optional<Counting> counting_;
};

}  // namespace trireme::train
