#pragma once
// A model in stages on several ranks, trained by a schedule of plan/schedule.h:
//
//   const auto schedule = plan::make_schedule(plan::ScheduleName::k1F1B, {4, 16});
//   parallel::Pipeline pipeline(schedule, {parallel::make_stage(rank, stage)}, loss, mesh);
//   const auto optimizers = pipeline.optimizers([](auto params) { return optim::adamw(params); });
//   for (...) {
//     const at::Tensor value = pipeline.forward_backward(inputs, targets);
//     pipeline.clip_grad_norm(1.0);
//     pipeline.step(optimizers);
//   }
//
// Each stage has a data-parallel engine of its own over the ranks of the mesh that hold the same stage, under
// any policy. Gradients are those of the whole model: means over all micro-batches.
#include <torch/nn/module.h>

#include <array>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "trireme/comm/mesh.h"
#include "trireme/nn/vocabulary_part.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/wrap.h"
#include "trireme/plan/lowering.h"
#include "trireme/plan/pipeline_report.h"

namespace trireme::nn {
class DeferredGradients;
}

namespace trireme::parallel {

class PipelineRecorder;
class StageLinks;

/// A stage that this rank holds.
struct Stage {
  int64_t index = 0;
  std::shared_ptr<torch::nn::Module> module;
  /// Of the module: one tensor to one tensor, which between stages is of a floating dtype. Does not write to
  /// its input.
  std::function<at::Tensor(const at::Tensor&)> forward;
  /// Called before each of its forward passes, with the number of the micro-batch among those that were
  /// given: for what the module needs to know of it beside the tensor.
  std::function<void(int64_t micro_batch)> begins = {};
  /// Of a part of a head that is spread (plan/spread_head.h) in place of `forward`: what its rows of the
  /// vocabulary make of the last stage's output, as nn::vocabulary_part() does.
  std::function<nn::VocabularyPart(const at::Tensor& hidden, const at::Tensor& targets)> part = {};
  /// Around the module, over stage_mesh(); none: the pipeline makes one.
  std::shared_ptr<DataParallel> engine = {};
};

/// Stage `index` of the schedule with `module`, whose forward(at::Tensor) takes a tensor and returns one. The
/// stage shares ownership of the module; Pipeline makes its engine.
template <typename Module>
Stage make_stage(int64_t index, std::shared_ptr<Module> module) {
  return {index, module, [&forward = *module](const at::Tensor& x) { return forward.forward(x); }};
}

/// Output of the last stage and target to a scalar: the mean over the micro-batch.
using StageLoss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

/// A parameter of which two stages have a copy, such as embeddings that are the head as well. Both start with
/// the values of the first, and get the sum of both gradients. They are frozen (requires_grad) and thawed
/// together, between steps; while they are frozen nothing is summed. Of a head that is spread each part is
/// tied to its rows of the embeddings:
///
///   for (int64_t part = 0; part < ranks; ++part)
///     options.tied.push_back({.stage = 0, .name = "embeddings", .other_stage = schedule.stages + part,
///                             .other_name = "rows", .first_row = first_rows[part]});
///
/// Copies stay equal to the bit under optimizers that treat each element by itself, and under those of optim/
/// with state in few bits when they are made after the pipeline: from then on the other copy's is rounded as
/// that of the first (DataParallel::round_as()). Rows begin at a multiple of 8 elements then.
struct TiedParameter {
  int64_t stage = 0;
  std::string name;  ///< as DataParallel::units() has it
  int64_t other_stage = 0;
  std::string other_name;
  /// The other copy, (R, ...), is of R rows of the first one, (N, ...), from this row on; none: of all of it.
  /// A row has one other copy at most.
  std::optional<int64_t> first_row = {};
};

/// The mesh of the engines of stages: that of the pipeline, or where two ranks have a copy of each stage
/// (Placement::kTwoWays) one in which both are data-parallel ranks. Collective over `mesh`.
comm::Mesh stage_mesh(const plan::Schedule& schedule, const comm::Mesh& mesh);

struct PipelineOptions {
  WrapOptions data_parallel = {};  ///< of the engines that the pipeline makes
  std::vector<TiedParameter> tied = {};
  /// Receive buffers beyond those that the schedule needs at once, for each stage and direction.
  int64_t ahead = 1;
  /// The host waits until each message has left, from the second step on: to see what that costs.
  bool blocking_sends = false;
  bool record = false;  ///< Pipeline::record() from the first step on
  /// This rank's program, in place of the one that the schedule and the engines make: the same work in
  /// another order (plan/given_program.h); none: that one. Parameters cannot be frozen or thawed then.
  std::optional<plan::StepProgram> program = {};
  /// Whether ranks tell each other before every step what they were given, as they do before the first one;
  /// hosts wait for each other meanwhile. None: on CPUs, where they do so anyway.
  std::optional<bool> agrees_each_step = {};
};

class Pipeline {
 public:
  /// `stages` are those of this rank, in any order; `loss` is used where the last one is, unless the head is
  /// spread, whose parts make the mean cross-entropy. The ranks of the
  /// schedule are those of the mesh's axis pp. Collective over the mesh. Throws ConfigError when schedule and
  /// mesh do not fit each other, ranks have different schedules, or the schedule cannot run (or not with
  /// sends that block), LogicError for stages that are not this rank's or a tied parameter that does not
  /// exist; what one rank refuses all do.
  Pipeline(plan::Schedule schedule, std::vector<Stage> stages, StageLoss loss, const comm::Mesh& mesh,
           const PipelineOptions& options = {});
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  /// Forward and backward passes of a step. `inputs` and `targets` are a whole batch of this data-parallel
  /// rank, which is cut into micro-batches of equal size along its first dimension; used where the first and
  /// the last stage are, and ignored (may be undefined) elsewhere, but that all parts of a head that is
  /// spread use targets. Both have the same number of rows. Returns the mean loss over all micro-batches of
  /// all data-parallel ranks, fp64 scalar, on every rank. Collective over the mesh. Throws ConfigError when
  /// micro-batches do not divide the batch. What one rank refuses all ranks do, and the next step may be
  /// right; but where they do not agree on each step (PipelineOptions::agrees_each_step), a rank that refuses
  /// another than the first ends the pipeline. So does a pass that throws: all ranks throw an error that
  /// names it, and the pipeline is of no more use.
  at::Tensor forward_backward(const at::Tensor& inputs, const at::Tensor& targets);
  /// The same for micro-batches as they are; shapes do not change from step to step. `weights`, given on all
  /// ranks of a pipeline alike, say how much each counts, as DataParallel::backward() has it; none: all the
  /// same.
  at::Tensor forward_backward(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& targets,
                              const std::vector<double>& weights = {});

  /// The mean loss of micro-batches, of any number and any shapes, by their weights: forward passes alone,
  /// without gradients. Vectors are of the same length on all ranks, tensors that are not used there may be
  /// undefined; a weight of 0 stands for a rank that has run out of data. fp64 scalar, on every rank. May
  /// come between any two steps; dropout is the modules' own. Refusals and errors are as in
  /// forward_backward(), and ranks agree each time. Collective over the mesh; the host waits.
  at::Tensor evaluate(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& targets,
                      const std::vector<double>& weights = {});
  /// One batch through all stages without gradients: what `last` makes of the output of the last one, on a
  /// rank that has it; undefined elsewhere. All ranks have it where the head is spread. Collective over the
  /// mesh; the host waits.
  at::Tensor infer(const at::Tensor& inputs, const std::function<at::Tensor(const at::Tensor&)>& last);

  /// Euclidean norm of the gradient of all stages; tied parameters count once. Collective over the mesh; the
  /// host waits.
  double grad_norm() const;
  /// Scales the gradient down to a norm of at most `max_norm` and returns the norm that it had. Collective;
  /// the host waits. Throws LogicError unless max_norm is positive.
  double clip_grad_norm(double max_norm);

  using Optimizers = std::vector<std::unique_ptr<optim::Optimizer>>;
  /// One an engine, each made by `make` from its parameters.
  Optimizers optimizers(
      const std::function<std::unique_ptr<optim::Optimizer>(std::vector<optim::FlatParam>)>& make);
  /// Updates the parameters of this rank's stages. Collective over data-parallel ranks.
  void step(const Optimizers& optimizers);
  /// Forgets the gradient.
  void skip_step();

  /// Those of this rank's stages that have parameters, in rising order of stages.
  const std::vector<std::shared_ptr<DataParallel>>& engines() const { return engines_; }
  const plan::Schedule& schedule() const { return schedule_; }
  /// The step of this rank: passes of its stages, their messages, and what their engines do
  /// meanwhile, as planned at first and then as the modules went last. Messages have no bytes.
  const plan::StepProgram& program() const { return *program_; }
  int64_t rank() const { return mesh_.pp_rank; }
  /// From the next step on, or no longer, times of passes and messages are kept for report(): two events on
  /// the GPU's stream for each, or two readings of a CPU's clock, and what torch's allocators give out. The
  /// same on all ranks of the pipeline.
  void record(bool on);
  /// What the ranks of this pipeline did in the last step that was recorded, on one clock. Bytes sent are
  /// those that the links counted. Collective over the mesh's axis pp; the host waits for the device. Throws
  /// LogicError when no step was recorded.
  plan::PipelineReport report();
  /// With what is simulated for another schedule of the same stages (plan::on_one_rank()).
  plan::PipelineReport report(const plan::Schedule& simulated);

  /// The host waits until everything that was sent has left.
  void flush();
  /// Sent by this rank to other stages so far.
  int64_t sent_bytes() const;
  /// Bytes of receive buffers, from the first step on.
  int64_t buffer_bytes() const;

 private:
  struct StageAtWork : Stage {
    /// The micro-batch whose backward pass ends the step and reduces the gradient meanwhile; none: it is
    /// reduced after all passes.
    std::optional<int64_t> last_backward = {};
    int64_t first_unit = 0;       ///< in the program
    int64_t written_version = 0;  ///< of its engine's programs, of which the program was made
  };
  struct InFlight {
    at::Tensor input, output;
  };
  /// Of a TiedParameter, what this rank has.
  struct Tie {
    at::Tensor first, other;             ///< the copies; undefined: not here
    int64_t rows = 0;                    ///< of the first one that are tied
    std::shared_ptr<comm::Group> group;  ///< with the rank of the other copy; null: there is none
  };
  using Place = std::pair<int64_t, int64_t>;  ///< stage and micro-batch
  /// What this rank was given.
  struct Batch {
    std::vector<at::Tensor> inputs, targets;
    std::vector<double> weights;
    /// Of inputs and targets, where they are used and were not cut by their giver; -1 elsewhere.
    std::array<int64_t, 2> rows = {-1, -1};
    bool has_targets = true;
  };
  using Finish = std::function<at::Tensor(const at::Tensor& output, int64_t micro_batch)>;

  void check_mesh() const;
  void check_sends() const;
  void agree_on_schedule();
  void take_stages(std::vector<Stage> stages);
  void make_engines_together();
  void make_engines();
  void end_engines();
  /// Of what this rank has, before ranks wait for each other. Throws LogicError for a tie of what is not
  /// there.
  void find_ties();
  /// Of each copy of each tied parameter its elements, its rows, and 1 where its stage came with an engine,
  /// else 0; each -1 where this rank has none.
  std::vector<double> tied_copies();
  /// Takes over how many rows are tied. Throws LogicError, on all ranks, for copies that do not fit each
  /// other, of which one alone came with an engine, and rows that would have several others.
  void take_tied_copies(const std::vector<std::vector<double>>& by_rank);
  void make_ties();
  /// What is tied of the first copy, or of something of its shape.
  at::Tensor tied_rows(size_t tie, const at::Tensor& first) const;
  /// Optimizers that are made from now on round both copies alike.
  void round_ties_alike();
  void start_equal(comm::Group& group, const at::Tensor& mine) const;
  /// A number for each copy of each tied parameter: whether this rank has it frozen, and -1 where it has
  /// none.
  std::vector<double> frozen_ties() const;
  /// `by_rank` are those of `ranks`. Throws LogicError where a copy is frozen and another one is not.
  void check_ties(const std::vector<std::vector<double>>& by_rank, const std::vector<int64_t>& ranks) const;
  bool is_tied(int64_t stage) const;
  StageAtWork* stage_here(int64_t index);
  bool is_last(int64_t stage) const { return stage + 1 == schedule_.stages; }
  /// Of a head that is spread no stage makes the loss: it is put together of parts.
  bool makes_loss(int64_t stage) const { return is_last(stage) && !schedule_.spread_head; }
  bool uses_targets() const { return schedule_.spread_head || is_last(stages_.back().index); }
  void check_usable() const;

  void check_batch(const Batch& batch, const plan::Schedule& schedule) const;
  /// What all ranks give as `mine`, by rank. What one refuses all do; `refusal` is this rank's; null: none.
  std::vector<std::vector<double>> gather_unless_refused(const std::exception_ptr& refusal,
                                                         std::vector<double> mine);
  /// Before what ranks agree: a step, where they may do so before the first one only, or forward passes.
  enum class Before { kStep, kForwards };
  void agree(Before what, const Batch& batch, const std::exception_ptr& refusal);
  at::Tensor step_on(Batch batch, const std::exception_ptr& refusal);
  void run_forward(Batch batch, const Finish& finish);
  using Program = std::shared_ptr<const plan::StepProgram>;
  void write_program();
  void take_program(plan::StepProgram program);
  bool is_written() const;
  void run_program(const plan::Schedule& schedule, const Program& forwards);
  size_t run_passes();
  void run_pass(const plan::Pass& pass);
  void reduce(size_t first);
  /// Runs what ranks do together outside of passes. When that throws, the pipeline fails `where`.
  void behind_passes(const char* where, const std::function<void()>& body);
  at::Tensor loss_of(const at::Tensor& output, int64_t micro_batch) const;
  double loss_scale(double weight) const;
  PipelineRecorder* recording() const;
  void run(const plan::Action& action);
  void forward(const plan::Action& action);
  void forward_part(const plan::Action& action);
  void backward(const plan::Action& action);
  /// The loss of a micro-batch and the totals for all parts; returns the gradient of `output`, the last
  /// stage's.
  at::Tensor join_parts(const at::Tensor& output, int64_t micro_batch);
  void join_losses(const std::vector<at::Tensor>& targets);
  void backward_weight(const plan::Action& action);
  /// `gradient` is that of the output; of the last stage's, which is the loss, there is none.
  void differentiate(StageAtWork& stage, const plan::Action& action, const at::Tensor& output,
                     const at::Tensor& gradient);
  /// What `pass` has made, in the messages of that kind.
  void hand_on(const plan::StagePass& pass, plan::Message message, const at::Tensor& tensor);
  void send(const plan::Action& action);
  at::Tensor arrived(plan::Message message, int64_t stage, int64_t micro_batch);
  bool sums(const Tie& tie) const;
  void mark_tied(const StageAtWork& stage, std::vector<plan::ProgramUnit>& units) const;
  std::vector<int64_t> tied_elements() const;
  void sum_tied();
  bool counts_in_norm(const Stage& stage) const;
  at::Tensor mean_loss() const;
  int64_t maker_of(const plan::Action& message) const;
  std::string in_words(const plan::Action* action) const;
  [[noreturn]] void fail(const std::string& where, const std::exception_ptr& error);

  plan::Schedule schedule_;
  StageLoss loss_;
  comm::Mesh mesh_, stage_mesh_;
  PipelineOptions options_;
  plan::StageActions actions_;  ///< of a step
  Program program_;
  std::vector<StageAtWork> stages_;  ///< in rising order
  std::vector<std::shared_ptr<DataParallel>> engines_;
  std::vector<Tie> ties_;  ///< by PipelineOptions::tied
  std::unique_ptr<StageLinks> links_;
  std::unique_ptr<PipelineRecorder> recorder_;  ///< null: nothing is recorded
  bool blocks_ = false;                         ///< sends do, now

  // One step.
  const plan::Schedule* running_ = nullptr;
  Program running_program_;
  std::optional<plan::Action> at_;  ///< what runs, for errors
  Batch batch_;
  Finish finish_;                 ///< what becomes of the output of the last stage
  std::vector<double> weights_;   ///< of micro-batches
  int64_t sent_beside_ = 0;       ///< bytes, by forward passes alone since then
  int64_t sent_before_step_ = 0;  ///< bytes
  std::map<Place, InFlight> in_flight_;
  std::map<Place, std::shared_ptr<nn::DeferredGradients>> deferred_;  ///< gradients of weights
  std::map<std::tuple<plan::Message, int64_t, int64_t>, at::Tensor> arrived_, leaving_;
  /// Losses by micro-batch, or what infer() asked for; of forward passes alone of parts their stats.
  std::map<int64_t, at::Tensor> finished_;
  std::string broken_;        ///< what has failed
  std::string failure_key_;   ///< where the ranks of this pipeline tell what has failed
  bool step_agreed_ = false;  ///< one of them was on a step
};

}  // namespace trireme::parallel
