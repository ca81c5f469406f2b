#pragma once
// A model cut into the stages of a pipeline (parallel/pipeline.h).
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/vocabulary_part.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/plan/config.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/stages.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::train {

/// A range of a model's units, with their parameters and no others, under the model's own names. Of a head
/// that is spread a part has some rows of its weight. Where the head is tied, the last stage has a copy of
/// the embeddings, or each part one of its rows of them.
class ModelStage : public torch::nn::Module {
 public:
  /// `config` is complete (plan::complete), `model` what it describes, of which this uses some; null, for
  /// text: a new one. `split`: this rank's part of each layer. Parameters are uninitialised, fp32, on the
  /// CPU.
  ModelStage(const plan::ModelConfig& config, plan::UnitRange range,
             std::shared_ptr<nn::Model> model = nullptr, plan::TensorSplit split = {});
  /// Documents of the micro-batch whose forward pass comes next; backward remembers them.
  void set_documents(nn::Documents documents) { documents_ = std::move(documents); }

  /// Whether it has all of the head.
  bool is_last() const {
    return range_.end == config_.n_layers + 2 && !range_.norm_alone && !range_.vocabulary;
  }
  /// Tokens (B, T) int64 or (B, T, D) of the stage before -> (B, T, D); of models of images what their units
  /// take and give, where channels are the last of four dimensions between stages of a model in that layout.
  /// The last stage returns what it is given: all its units run in loss().
  at::Tensor forward(const at::Tensor& x) const;
  /// Of the last stage: what forward() returned -> mean cross-entropy in nats, scalar fp32.
  at::Tensor loss(const at::Tensor& x, const nn::LossTarget& target) const;
  /// The same -> logits (B, ..., V). Of a part of the head those of its rows, of the output of the last
  /// stage.
  at::Tensor logits(const at::Tensor& x) const;
  /// Of a part of the head: the output of the last stage (B, T, D) -> nn::vocabulary_part().
  nn::VocabularyPart part(const at::Tensor& hidden, const nn::LossTarget& target) const;
  /// Dropout as in training, or none.
  void train(bool on = true) override;

  /// Fills the parameters, which no engine has yet.
  void fill(const nn::InitialWeights& initial) const;
  /// An engine over `mesh` with the units of this stage, through which they run from now on, as connect()
  /// says. The stage must outlive it. Collective. Throws as DataParallel.
  std::shared_ptr<parallel::DataParallel> make_engine(const comm::Mesh& mesh,
                                                      const parallel::Options& options,
                                                      const nn::InitialWeights& initial,
                                                      const plan::MemoryConfig& memory = {},
                                                      const plan::Fp8Config& fp8 = {},
                                                      const nn::Fp8History* history = nullptr);

  /// The embeddings that the head is, too; none: the head is not tied.
  static std::optional<std::string> tied_parameter(const plan::ModelConfig& config);
  /// The copies of them that stages other than the first one have.
  static std::vector<parallel::TiedParameter> ties(const plan::ModelConfig& config,
                                                   const plan::PipelinePlan& pipeline);

 private:
  nn::LanguageModel& text() const { return dynamic_cast<nn::LanguageModel&>(*model_); }
  void adopt(const std::vector<plan::UnitSpec>& units);
  bool moves_channels() const;
  at::Tensor run(std::vector<nn::Unit> units, const at::Tensor& x) const;
  at::Tensor run_part(const nn::UnitForward& forward, const at::Tensor& hidden) const;

  plan::ModelConfig config_;
  plan::TensorSplit split_;
  std::shared_ptr<nn::Model> model_;
  plan::UnitRange range_;
  nn::Documents documents_;
};

}  // namespace trireme::train
