#pragma once
// A model in stages: pipelines, with data parallelism inside the stages.
#include <map>
#include <optional>
#include <set>

#include "trireme/base/hash.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/train/model_stage.h"
#include "trireme/train/trained_model.h"

namespace trireme::train {

class StagedModel : public TrainedModel {
 public:
  explicit StagedModel(const ModelSetup& setup);
  ~StagedModel() override;

  at::Tensor run_passes(const std::function<data::Batch()>& next, double scale) override;
  at::Tensor grad_squares() const override;
  at::Tensor sum_over_ranks(const at::Tensor& squares) const override;
  double sum_over_ranks(const std::vector<std::vector<double>>& squares) const override;
  at::Tensor unit_grad_squares() const override;
  const std::vector<std::string>& units() const override { return units_; }
  int64_t sent_bytes() const override;
  void record_steps(bool on) override { pipeline_->record(on); }
  std::optional<plan::PipelineReport> step_report() override { return pipeline_->report(); }
  int64_t batches_at_once() const override { return plan_.schedule.micro_batches; }
  void sync_buffers() override;
  Scores evaluate(const std::vector<data::Batch>& batches, Guesses* guesses) override;
  std::vector<int32_t> generate(std::vector<int32_t> prompt, const SamplingOptions& options) override;
  void save_weights(const std::string& path, const parallel::Notes& notes) override;
  std::string base_digest() override;
  std::string weights_digest() override;

  parallel::Pipeline& pipeline() { return *pipeline_; }

 private:
  /// The part of a tensor that a stage saves.
  struct Saved {
    int64_t stage;
    plan::Shape shape;  ///< of what it has
    plan::Part part;
    bool frozen = false;  ///< for good
  };
  using Visitor = std::function<void(const std::string& name, const at::Tensor& weight)>;
  /// What the engines of this rank have.
  using Readers = std::vector<parallel::DataParallel::Weights>;
  Readers readers();
  /// A whole parameter of the model, on the CPU of rank 0 of the job, on whose way it has `dtype`; undefined
  /// on others. Collective.
  at::Tensor whole(const std::string& name, Readers& readers, at::ScalarType dtype = at::kFloat);
  /// Calls body(name, fp32 CPU tensor, undefined but on rank 0) for every parameter of the model that is
  /// trained, or frozen for good, in name order, with one of them on its way at a time. Collective.
  void visit_weights(bool frozen, const Visitor& body);
  AdaptedModel adapted() override;
  /// The digest that rank 0 has, on all ranks.
  std::string shared(const StreamingHash& hash) const;
  /// The same for buffers, in their dtypes.
  void visit_buffers(const Visitor& body);
  /// `mine`, which the first data-parallel rank of a stage has, on rank 0 of the job; undefined on others.
  at::Tensor on_root(const at::Tensor& mine, const Saved& saved, at::ScalarType dtype);
  /// With its module, engine and optimizer, which this rank keeps from now on.
  parallel::Stage add_stage(int64_t stage, const comm::Mesh& engine_mesh, const nn::InitialWeights& initial);
  void name_units(const plan::ModelFacts& facts);
  bool reads_images() const;
  /// Keeps the documents of the micro-batches that come next, which all stages of this rank read.
  void take_documents(const std::vector<data::Batch>& batches);
  std::shared_ptr<nn::Model> image_model_of(const comm::Mesh& mesh) const;
  parallel::StageLoss loss_function();
  Scores evaluate_images(const std::vector<data::Batch>& batches, Guesses* guesses);
  void count(const at::Tensor& logits, const at::Tensor& targets);
  std::function<nn::VocabularyPart(const at::Tensor&, const at::Tensor&)> head_part_function() const;
  /// (rows of this rank's part) logits -> (V) of all parts. Collective over the pipeline.
  at::Tensor joined_logits(const at::Tensor& mine) const;
  at::Tensor on_device(const at::Tensor& tensor) const;
  /// (1, T) tokens -> (V) logits for the next one, fp32 on the CPU of every rank.
  at::Tensor next_logits(const at::Tensor& tokens);
  void set_training(bool on);
  std::set<int64_t> holders_of(int64_t stage) const;

  const plan::Config& config_;
  const plan::ModelFacts& facts_;
  comm::Mesh mesh_;
  int64_t micro_batch_;
  plan::TensorSplit split_;  ///< what this rank has of each stage
  plan::PipelinePlan plan_;
  std::vector<std::shared_ptr<ModelStage>> stages_;  ///< of this rank
  std::vector<int64_t> stage_of_engine_;             ///< by index of parts()
  std::shared_ptr<ModelStage> last_;                 ///< with the head; null: this rank lacks it
  std::shared_ptr<ModelStage> head_part_;            ///< of a head that is spread; null: it is not
  std::unique_ptr<parallel::Pipeline> pipeline_;
  std::vector<nn::Documents> documents_;  ///< of the micro-batches that are given next
  double scale_ = 1.0;                    ///< of the gradients of the step under way
  std::vector<std::string> units_;
  std::vector<size_t> first_unit_;  ///< in units_, by stage
  std::map<std::string, std::vector<Saved>> saved_params_;
  std::map<std::string, Saved> saved_buffers_;
  /// Of the images that are evaluated now; none in training.
  struct Counting {
    Scores scores;
    Guesses* guesses;
  };
  std::optional<Counting> counting_;
};

}  // namespace trireme::train
