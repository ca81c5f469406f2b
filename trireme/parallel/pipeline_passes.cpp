// The passes of a pipeline's step: what this rank's program says, one action after the other.
#include <ATen/ATen.h>

#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/error_of.h"
#include "trireme/kernels/range.h"
#include "trireme/nn/deferred_gradients.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/parallel/pipeline_recorder.h"
#include "trireme/parallel/stage_links.h"
#include "trireme/plan/stage_program.h"

namespace trireme::parallel {
namespace {

using plan::Action;
using plan::Message;
using plan::Placement;
using Kind = plan::ActionKind;

std::vector<at::Tensor> cut(const at::Tensor& batch, int64_t micro_batches, const char* what) {
  if (!batch.defined()) return {};
  const int64_t rows = batch.dim() > 0 ? batch.size(0) : 0;
  if (rows == 0 || rows % micro_batches != 0) {
    throw ConfigError(
        "[parallel.pipeline] {} of {} rows do not divide into {} micro-batches; give a multiple of {} rows, "
        "or "
        "micro-batches of your own with their weights",
        what, rows, micro_batches, micro_batches);
  }
  return batch.chunk(micro_batches);
}

/// A stage may make a view of what it was given. The memory of that is a receive buffer, into which the next
/// message is written as soon as the stage is done with the micro-batch.
at::Tensor out_of_buffer(const at::Tensor& made, const at::Tensor& given) {
  return given.defined() && made.is_alias_of(given) ? made.clone() : made;
}

}  // namespace

at::Tensor Pipeline::forward_backward(const at::Tensor& inputs, const at::Tensor& targets) {
  check_usable();
  Batch batch;
  const auto refusal = error_of([&] {
    batch.inputs = cut(inputs, schedule_.micro_batches, "inputs");
    batch.targets = cut(targets, schedule_.micro_batches, "targets");
    check_batch(batch, schedule_);
    if (stages_.front().index == 0) batch.rows[0] = inputs.size(0);
    if (uses_targets()) batch.rows[1] = targets.size(0);
  });
  return step_on(std::move(batch), refusal);
}

at::Tensor Pipeline::forward_backward(const std::vector<at::Tensor>& inputs,
                                      const std::vector<at::Tensor>& targets,
                                      const std::vector<double>& weights) {
  check_usable();
  Batch batch{inputs, targets, weights};
  const auto refusal = error_of([&] { check_batch(batch, schedule_); });
  return step_on(std::move(batch), refusal);
}

at::Tensor Pipeline::step_on(Batch batch, const std::exception_ptr& refusal) {
  const auto refused = refusal ? refusal : error_of([&] {
    TRIREME_CHECK(
        at::GradMode::is_enabled(),
        "[parallel.pipeline] rank {}: gradients are off, and a step differentiates; call it outside "
        "of at::NoGradGuard",
        mesh_.world->rank());
    check_ties({frozen_ties()}, {mesh_.world->rank()});
  });
  agree(Before::kStep, batch, refused);
  step_agreed_ = true;
  batch_ = std::move(batch);
  finish_ = [this](const at::Tensor& output, int64_t micro_batch) { return loss_of(output, micro_batch); };
  for (const auto& engine : engines_) engine->follow_freezing();
  run_program(schedule_, nullptr);
  at::Tensor mean;
  behind_passes("at the end of a step", [&] { mean = mean_loss(); });
  return mean;
}

at::Tensor Pipeline::loss_of(const at::Tensor& output, int64_t micro_batch) const {
  at::Tensor loss = loss_(output, batch_.targets.at(static_cast<size_t>(micro_batch)));
  TRIREME_CHECK(loss.numel() == 1,
                "[parallel.pipeline] the loss of micro-batch {} is no scalar but ({}); return its mean",
                micro_batch, fmt::join(loss.sizes(), ", "));
  return loss;
}

at::Tensor Pipeline::evaluate(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& targets,
                              const std::vector<double>& weights) {
  if (schedule_.spread_head) {
    const StageAtWork& mine = stages_.back();
    run_forward({inputs, targets, weights}, [&](const at::Tensor& hidden, int64_t micro_batch) {
      return mine.part(hidden, batch_.targets.at(static_cast<size_t>(micro_batch))).stats;
    });
  } else {
    run_forward({inputs, targets, weights}, [this](const at::Tensor& output, int64_t micro_batch) {
      return loss_of(output, micro_batch);
    });
  }
  at::Tensor mean;
  behind_passes("behind forward passes", [&] {
    if (schedule_.spread_head) join_losses(targets);
    mean = mean_loss();
  });
  return mean;
}

/// Where several pipelines are data-parallel, one that fails leaves the others waiting here.
void Pipeline::behind_passes(const char* where, const std::function<void()>& body) {
  try {
    body();
  } catch (...) {
    fail(fmt::format("rank {} {}", mesh_.world->rank(), where), std::current_exception());
  }
}

at::Tensor Pipeline::infer(const at::Tensor& inputs,
                           const std::function<at::Tensor(const at::Tensor&)>& last) {
  Batch batch;
  batch.inputs = {inputs};
  batch.has_targets = false;
  run_forward(std::move(batch), [&](const at::Tensor& output, int64_t) { return last(output); });
  return finished_.empty() ? at::Tensor() : finished_.at(0);
}

/// Messages have shapes of their own here, which travel with the first one of each stage and micro-batch.
void Pipeline::run_forward(Batch batch, const Finish& finish) {
  check_usable();
  const at::NoGradGuard no_grad;
  const plan::Schedule forwards = plan::forward_only(schedule_, std::ssize(batch.inputs));
  agree(Before::kForwards, batch, error_of([&] { check_batch(batch, forwards); }));
  batch_ = std::move(batch);
  finish_ = finish;
  const StageLinks::Shapes of_steps = links_->exchange_shapes({});
  behind_passes("before forward passes", [&] { links_->flush(); });
  const int64_t sent_before = links_->sent_bytes();
  // Engines run forward passes alone by programs of their own.
  std::vector<plan::ProgramStage> stages;
  for (const StageAtWork& stage : stages_) stages.emplace_back().index = stage.index;
  run_program(forwards, std::make_shared<const plan::StepProgram>(plan::stage_program(
                            forwards, plan::lower_forward(forwards, rank(), options_.ahead), stages, {})));
  behind_passes("behind forward passes", [&] { links_->flush(); });
  sent_beside_ += links_->sent_bytes() - sent_before;
  links_->exchange_shapes(of_steps);
}

/// `forwards`: passes forward alone; null: a step.
void Pipeline::run_program(const plan::Schedule& schedule, const Program& forwards) {
  const auto count = static_cast<size_t>(schedule.micro_batches);
  weights_ = batch_.weights.empty() ? std::vector<double>(count, 1.0) : batch_.weights;
  running_ = &schedule;
  finished_.clear();
  at_.reset();
  const bool trains = forwards == nullptr;
  if (trains) {
    sent_before_step_ = links_->sent_bytes();
    sent_beside_ = 0;
  }
  const PipelineRecorder::Step step(recording());
  try {
    // Of two directions every rank has its own order, in which it cannot gather parameters with others.
    std::vector<std::unique_ptr<DataParallel::Held>> held;
    if (schedule.placement == Placement::kTwoWays) {
      for (const auto& engine : engines_)
        held.push_back(std::make_unique<DataParallel::Held>(*engine, Whole::kAsUsed));
    }
    running_program_ = forwards;
    const size_t behind = run_passes();
    at_.reset();
    links_->settle();  // the collectives that follow wait on the GPU
    if (trains) {
      blocks_ = options_.blocking_sends;  // shapes are known from now on
      reduce(behind);
    }
  } catch (...) {
    fail(in_words(at_ ? &*at_ : nullptr), std::current_exception());
  }
  running_ = nullptr;
  batch_ = {};
  finish_ = {};
}

/// The passes of stages, in which engines may find out how their modules go: then the program is written
/// anew, with the same passes. Returns the first pass behind them.
size_t Pipeline::run_passes() {
  const bool trains = running_program_ == nullptr;
  for (size_t next = 0;; ++next) {
    if (trains && !is_written()) write_program();
    if (trains) running_program_ = program_;
    const std::vector<plan::Pass>& passes = running_program_->passes;
    if (next == passes.size()) return next;
    const plan::Pass& pass = passes[next];
    if (pass.kind != plan::Pass::Kind::kTransfer && !plan::computing(pass.kind)) return next;
    run_pass(pass);
  }
}

/// DataParallel::Held gathers and frees what units that stay whole do.
void Pipeline::run_pass(const plan::Pass& pass) {
  const StageAtWork& stage = *stage_here(pass.stage);
  std::optional<EnginePrograms::Given> given;
  if (stage.engine && at::GradMode::is_enabled())
    given.emplace(stage.engine->programs_, Turn{running_program_, &pass, stage.first_unit});
  bool computed = false;
  for (auto place = static_cast<size_t>(pass.begin); place < static_cast<size_t>(pass.end); ++place) {
    const Action& action = running_program_->actions[place];
    if (action.is_message()) {
      run(at_.emplace(action));
    } else if (const auto kind = plan::computing(pass.kind); kind && !std::exchange(computed, true)) {
      run(at_.emplace(Action{.kind = *kind, .micro_batch = pass.micro_batch, .stage = pass.stage}));
    }
  }
}

/// Gradients that passes have left: of tied parameters, of stages whose gradients come apart, and of those
/// that two ranks have.
void Pipeline::reduce(size_t first) {
  const PipelineRecorder::Span span(recording(), Kind::kReduce);
  for (size_t next = first; next < program_->passes.size(); ++next) {
    const plan::Pass& pass = program_->passes[next];
    if (pass.kind == plan::Pass::Kind::kSumTied) sum_tied();
    const StageAtWork& stage = *stage_here(pass.stage);
    if (pass.kind != plan::Pass::Kind::kReduce || !stage.engine) continue;
    const EnginePrograms::Given given(stage.engine->programs_, {running_program_, &pass, stage.first_unit});
    stage.engine->reduce_accumulated();
  }
}

/// Steps are recorded, and not forward passes alone.
PipelineRecorder* Pipeline::recording() const {
  return at::GradMode::is_enabled() ? recorder_.get() : nullptr;
}

void Pipeline::run(const Action& action) {
  const kernels::TraceRange range(plan::stage_text(action));
  const PipelineRecorder::Span span(recording(), action);
  switch (action.kind) {
    case Kind::kForward:
      return forward(action);
    case Kind::kBackward:
    case Kind::kBackwardInput:
      return backward(action);
    case Kind::kBackwardWeight:
      return backward_weight(action);
    case Kind::kSend:
      return send(action);
    case Kind::kPost:
      return links_->post(action);
    case Kind::kRecv:
      arrived_[{action.message, action.stage, action.micro_batch}] = links_->take(action);
      return;
    default:
      throw LogicError("[parallel.pipeline] {} is no action of a stage", action.kind);
  }
}

at::Tensor Pipeline::arrived(Message message, int64_t stage, int64_t micro_batch) {
  auto node = arrived_.extract({message, stage, micro_batch});
  TRIREME_CHECK(!node.empty(), "[parallel.pipeline] nothing has arrived for stage {}, micro-batch {}", stage,
                micro_batch);
  return std::move(node.mapped());
}

/// To stages of this rank, or to the sends that follow.
void Pipeline::hand_on(const plan::StagePass& pass, Message message, const at::Tensor& tensor) {
  for (const plan::StageEdge& made : plan::made_by(*running_, pass)) {
    if (made.message != message) continue;
    const bool stays = running_->rank_of(made.to, pass.micro_batch) == rank();
    (stays ? arrived_ : leaving_)[{message, made.stage, pass.micro_batch}] = tensor;
  }
}

void Pipeline::send(const Action& action) {
  const at::Tensor tensor = leaving_.extract({action.message, action.stage, action.micro_batch}).mapped();
  if (PipelineRecorder* const recorder = recording()) recorder->counts(static_cast<int64_t>(tensor.nbytes()));
  links_->send(action, tensor);
  if (blocks_ && at::GradMode::is_enabled()) links_->flush();
}

void Pipeline::forward(const Action& action) {
  const int64_t stage = action.stage, micro_batch = action.micro_batch;
  if (running_->is_head_part(stage)) return forward_part(action);
  at::Tensor input;
  if (stage == 0) {
    input = batch_.inputs.at(static_cast<size_t>(micro_batch));
  } else {
    // A leaf of the micro-batch's own graph: its gradient goes back to the stage before.
    input = arrived(Message::kActivation, stage, micro_batch).variable_data();
    TRIREME_CHECK(
        input.is_floating_point(),
        "[parallel.pipeline] stage {} made {}, which has no gradient; cut the model where a floating "
        "tensor passes",
        stage - 1, c10::toString(input.scalar_type()));
    input.requires_grad_(at::GradMode::is_enabled());
  }
  InFlight& pass = in_flight_[{stage, micro_batch}] = {input, {}};
  const StageAtWork& here = *stage_here(stage);
  if (here.engine) here.engine->begin_forward();
  if (here.begins) here.begins(micro_batch);
  at::Tensor output = here.forward(input);
  if (makes_loss(stage)) {
    output = finish_(output, micro_batch);
    finished_[micro_batch] = out_of_buffer(output.detach(), input);
  } else {
    hand_on({Kind::kForward, stage, micro_batch}, is_last(stage) ? Message::kHidden : Message::kActivation,
            out_of_buffer(output.detach(), input));
  }
  pass.output = output;
  if (!at::GradMode::is_enabled()) in_flight_.erase({stage, micro_batch});
}

void Pipeline::backward(const Action& action) {
  const int64_t stage = action.stage, micro_batch = action.micro_batch;
  InFlight pass = std::move(in_flight_.extract({stage, micro_batch}).mapped());
  if (running_->is_head_part(stage))
    return differentiate(*stage_here(stage), action, pass.output,
                         arrived(Message::kTotals, stage, micro_batch));
  const at::Tensor gradient = makes_loss(stage) ? at::Tensor()
                              : is_last(stage)  ? join_parts(pass.output, micro_batch)
                                                : arrived(Message::kGradient, stage, micro_batch);
  if (action.kind == Kind::kBackwardInput) {
    const auto later = std::make_shared<nn::DeferredGradients>();
    const nn::DeferredGradients::Scope scope(*later);
    differentiate(*stage_here(stage), action, pass.output, gradient);
    deferred_[{stage, micro_batch}] = later;
    const bool in_buffer = !is_last(stage) && running_->rank_of(stage + 1, micro_batch) != rank();
    if (PipelineRecorder* const recorder = recording())
      recorder->counts(later->bytes(in_buffer ? gradient : at::Tensor()));
  } else {
    differentiate(*stage_here(stage), action, pass.output, gradient);
  }
  if (stage == 0) return;
  TRIREME_CHECK(pass.input.grad().defined(),
                "[parallel.pipeline] the output of stage {} does not depend on its input", stage);
  hand_on({Kind::kBackward, stage, micro_batch}, Message::kGradient,
          out_of_buffer(pass.input.grad(), gradient));
}

void Pipeline::differentiate(StageAtWork& stage, const Action& action, const at::Tensor& output,
                             const at::Tensor& gradient) {
  const double weight = weights_[static_cast<size_t>(action.micro_batch)];
  DataParallel* const engine = stage.engine.get();
  const bool last = stage.last_backward == action.micro_batch;
  if (makes_loss(stage.index)) {
    if (engine == nullptr) {
      const double scale = loss_scale(weight);
      output.backward(at::full_like(output, scale));
    } else {
      last ? engine->backward(output, weight) : engine->accumulate(output, weight);
    }
    return;
  }
  if (engine == nullptr) {
    if (output.requires_grad()) output.backward(gradient);
  } else {
    // Nothing of a frozen first stage is differentiated, but its engine counts micro-batches all the same.
    const at::Tensor from = output.requires_grad() ? output : output.detach().requires_grad_(true);
    last ? engine->backward(from, gradient, weight) : engine->accumulate(from, gradient, weight);
  }
}

/// As the engines average, for a gradient that none of them has made of a loss. It counts once along tp.
double Pipeline::loss_scale(double weight) const {
  if (mesh_.tp->rank() > 0) return 0.0;
  const bool mean = options_.data_parallel.average == Average::kMean;
  return mean ? weight / static_cast<double>(stage_mesh_.dp->size()) : weight;
}

/// Nothing is left to do for modules whose backward pass computes both gradients at once.
void Pipeline::backward_weight(const Action& action) {
  const auto later = deferred_.extract({action.stage, action.micro_batch}).mapped();
  DataParallel* const engine = stage_here(action.stage)->engine.get();
  if (engine != nullptr && later->count() > 0) engine->accumulate_deferred([&] { later->run(); });
}

at::Tensor Pipeline::mean_loss() const {
  const auto options = at::TensorOptions().device(mesh_.world->device()).dtype(at::kDouble);
  at::Tensor sum = at::zeros({}, options);
  double weight = 0.0;
  for (const auto& [micro_batch, loss] : finished_) {
    const double factor = weights_[static_cast<size_t>(micro_batch)];
    if (factor == 0.0) continue;  // its loss may be a mean over nothing
    sum += loss.to(at::kDouble).reshape({}) * factor;
    weight += factor;
  }
  const at::Tensor mine = at::stack({sum, at::full({}, weight, options)});
  const at::Tensor all = mesh_.all->size() > 1 ? comm::gather_rows(*mesh_.all, mine).sum(0) : mine;
  return all[0] / all[1];
}

}  // namespace trireme::parallel
