#pragma once
// The data-parallel engine: DDP, ZeRO and FSDP as rows of plan/policy.h over one code path. It wraps a module
// without changing it: its parameters become views of flat units. A unit is unsharded before its parameters
// are used, resharded afterwards, and reduced when its gradients are complete. The module announces the use
// of a unit by run_unit(); for modules that know nothing of units, the operators that touch parameters do
// (nn::TouchWatch).
//
// A step:  for each micro-batch but the last { accumulate(model->loss(...)); }
//          backward(model->loss(...)); clip_grad_norm(1.0); step(optimizer);
#include <torch/nn/module.h>

#include <c10/core/StreamGuard.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/comm/mesh.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/completion.h"
#include "trireme/parallel/engine_programs.h"
#include "trireme/parallel/evaluation.h"
#include "trireme/parallel/executor.h"
#include "trireme/parallel/flat_unit.h"
#include "trireme/parallel/frozen_alike.h"
#include "trireme/parallel/gradient_mean.h"
#include "trireme/plan/model_facts.h"

namespace torch::optim {
class Optimizer;
}

namespace trireme::parallel {

using plan::UseFrom;

/// The engine around one module, under one policy. Made by data_parallel() and fully_shard() (wrap.h), or for
/// a model that announces its units by the constructor.
class DataParallel {
 public:
  /// `units` name every parameter of `module` exactly once, one that is registered under several names by the
  /// first of them (module_parameters.h). Unless they are buckets the first is the root, which stays
  /// unsharded from the start of a forward pass to the end of backward. With kRunUnit they are in the order
  /// of a forward pass, and the last one stays unsharded for its backward, which follows. `module` must
  /// outlive this. Collective. Throws ConfigError as checked() of options.h, LogicError that names what does
  /// not fit, and EnvironmentError when libtorch is not what the engine was made for. When the constructor
  /// throws, a user's module (Options::users_module) has its parameters back.
  DataParallel(torch::nn::Module& module, const std::vector<plan::UnitSpec>& units, const comm::Mesh& mesh,
               const Options& options, const Initializer& initializer, UseFrom use_from = UseFrom::kRunUnit);
  /// With Options::users_module the module gets its parameters back: memory of their own with the values of
  /// the fp32 masters, in the dtype that they had. Collective where the policy shards masters. When that
  /// fails, and when the engine ends by an exception, sharded parameters refuse use by name.
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Runs a unit of the module (any of its own, where units() are buckets): unshards it, calls `forward`,
  /// reshards it unless it is the root, and arranges the same for backward. `begins_pass`: it is the first
  /// unit of a forward pass, also of validation; begin_forward() is called first. Collective where parameters
  /// are sharded, and as begin_forward().
  at::Tensor run_unit(const std::string& unit, const at::Tensor& x,
                      const std::function<at::Tensor(const at::Tensor&)>& forward, bool begins_pass);

  /// Takes over what was written to parameters, and unshards the root or all buckets. To be called before a
  /// forward pass that follows another one without a backward pass between them, as in pipelines; run_unit()
  /// calls it with `begins_pass`. Collective where parameters are sharded, or an optimizer of torch has made
  /// an update.
  void begin_forward();
  /// Differentiates `loss`, one number, in the last or only micro-batch of a step and reduces gradients as
  /// they become complete. Forward and backward of a step are called on one stream of the device, any one.
  /// The gradient is the mean over all micro-batches of all ranks by `weight`, or their sum
  /// (Options::average): with a loss that is the mean over n rows, the weight n gives the mean over all rows.
  /// A loss in bf16 or fp16 counts with its weight as that dtype rounds it. Parameters apart, all that the
  /// pass reaches sees gradients times loss_factor(): hooks on activations, inputs, and leaves outside of the
  /// module. When it returns, the current
  /// stream waits for all reductions; where every rank then gathers the reduced gradient, step() waits for
  /// that. Throws LogicError for what is no loss with a graph, that names parameters without gradient or
  /// one that not all ranks have frozen (on a GPU in the next step), for a weight that is not 0 and not
  /// within 1e-20 and 1e20, for losses that differ along tp, and when nobody has used the gradient of the
  /// step before. When the pass itself throws, for whatever reason, the step is forgotten as by skip_step():
  /// repeat it from its first micro-batch, on all ranks. Collective.
  void backward(const at::Tensor& loss, double weight = 1.0);
  /// What backward() and accumulate() multiply a loss of this dtype by before they differentiate it: the
  /// weight, divided by the number of ranks where gradients are means. Only parameters get the mean, once
  /// ranks have added up. Divide by it what a hook on an activation sees, the gradient of an input, or that
  /// of a leaf outside of the module, to have what loss.backward() gives. Where layers are cut over ranks
  /// along tp (tensor_layers.h), the sum over these ranks is meant.
  double loss_factor(double weight = 1.0, at::ScalarType loss = at::kFloat) const {
    return mean_.factor_of(weight, loss);
  }
  /// backward() for a micro-batch that other micro-batches of the step follow. Collective where parameters
  /// are sharded, or gradients are reduced after every micro-batch.
  void accumulate(const at::Tensor& loss, double weight = 1.0);
  /// backward() and accumulate() for an output of the module that is no loss: `grad_output`, of its shape, is
  /// the gradient of a loss that another engine has differentiated with the same weight.
  void backward(const at::Tensor& output, const at::Tensor& grad_output, double weight);
  void accumulate(const at::Tensor& output, const at::Tensor& grad_output, double weight);
  /// Runs `compute`, which adds to grad() of parameters the gradients that an earlier accumulate() of the
  /// step has deferred (nn::DeferredGradients).
  void accumulate_deferred(const std::function<void()>& compute);
  /// Ends a step of which all micro-batches were accumulated, as backward() does. Collective.
  void reduce_accumulated();
  /// The gradient accumulated on this rank for a parameter: of its shape, in the dtype in which micro-batches
  /// are added up (Options::accumulate), in place, so that callers can add to it before reduce_accumulated().
  /// Throws LogicError when nothing was accumulated.
  at::Tensor accumulated_gradient(const std::string& parameter);
  /// Takes part in a micro-batch of the other ranks for which this one has no data: same collectives,
  /// gradients of zero, no weight. Collective as backward() or accumulate(). Throws LogicError before this
  /// rank's first whole step and, where parameters are sharded, before its first step since some of them were
  /// frozen or thawed.
  void shadow_micro_batch(bool last_micro_batch = true);
  /// Whether `mine` is true on any data-parallel rank: ends loops over uneven data together. Collective; the
  /// host waits.
  bool any_rank(bool mine) const;

  /// Sum of squares of this rank's part of the gradient, fp64 scalar on the device. The parts of all ranks
  /// make up the gradient.
  at::Tensor grad_squares() const { return unit_grad_squares().sum(); }
  /// The same by unit: (units) fp64, in the order of units().
  at::Tensor unit_grad_squares() const;
  /// The same for one parameter: fp64 scalar; 0 when it is frozen.
  at::Tensor param_grad_squares(const std::string& parameter) const;
  double local_grad_squares() const { return grad_squares().item<double>(); }
  /// Adds up one number for each data-parallel rank, in an order that no policy changes. No communication.
  double sum_over_ranks(const std::vector<double>& by_dp_rank) const;
  at::Tensor sum_over_ranks(const at::Tensor& by_dp_rank) const;  // (ranks) -> ()
  /// Euclidean norm of the whole gradient, without the parameters `without`. Where gradients were handed out
  /// by optimizer_tensors() it is that of their grad() as it is now, so what others have written there
  /// counts. Under local SGD it is the root mean square of the ranks' norms, which is no less than the norm
  /// of their mean gradient. Collective; the host waits.
  double grad_norm(const std::vector<std::string>& without = {}) const;
  /// Scales the gradient down to a norm of at most `max_norm` and returns the norm that it had, as
  /// torch.nn.utils.clip_grad_norm_ does for a module on one rank. Collective; the host waits. Throws
  /// LogicError unless max_norm is positive, and when there is no complete gradient.
  double clip_grad_norm(double max_norm);
  /// Multiplies the gradient by `factor`. No communication. Throws LogicError when there is no complete
  /// gradient.
  void scale_gradient(double factor);
  /// The name of a parameter whose gradient is not finite on this rank; empty: there is none.
  std::string nonfinite_parameter() const;

  /// For optim::adamw() and its like: this rank's part of the parameters that require gradients, in the
  /// groups of `rule`. Parameters that are frozen later stay as they are until they are thawed.
  std::vector<optim::FlatParam> optimizer_params(const GroupRule& rule = {});
  /// Optimizers that are made from now on and keep their state in few bits round that of `parameter` as if it
  /// were the elements of one called `name` from element `first` on, a multiple of 8: so copies of rows of a
  /// parameter stay equal to it. Throws LogicError for a parameter that is not there.
  void round_as(const std::string& parameter, const std::string& name, int64_t first);
  /// Updates unit by unit, and begins to all-gather each updated one where the policy keeps parameters whole;
  /// the next forward pass waits for the units that it uses. Throws LogicError when there is no complete
  /// gradient since the last update, when the optimizer is another engine's, and names a parameter that it
  /// was not made for. Collective.
  void step(optim::Optimizer& optimizer);
  /// Throws LogicError unless `optimizer` was made from optimizer_params() of this engine.
  void check_own(const optim::Optimizer& optimizer, const char* operation) const;
  /// Whether a parameter required a gradient when optimizer_params() was called.
  bool optimizes(size_t unit, size_t param) const { return optimized_.at(unit)[param]; }
  /// step() with gradients that are multiplied by `grad_scale` first.
  void step_scaled(optim::Optimizer& optimizer, const optim::GradScale& grad_scale);

  /// Parameters and their averages over steps, which `optimizer` keeps (plan::OptimConfig::ema), change
  /// places: once to evaluate or save the averages, and once more before training goes on, to the same bits.
  /// Between steps. Collective. Throws LogicError where no averages are kept, and when a gradient waits for
  /// its update.
  void swap_averages(optim::Optimizer& optimizer);

  /// For optimizers of torch: this rank's part of the fp32 masters of all parameters, by name: whole and of
  /// the parameter's shape where this rank has all of it, else a range of its elements, (n), which may be
  /// empty. backward() sets their grad(), but of parameters that are frozen, whose grad() is undefined, so
  /// that optimizers leave them out until they are thawed. Right for optimizers that treat each element by
  /// itself (AdamW, SGD, Adagrad, RMSprop), and under ddp for all. From then on gradients go to these tensors
  /// only.
  std::vector<std::pair<std::string, at::Tensor>> named_optimizer_tensors();
  /// Those tensors for whose names `select` is true; without `select` all.
  std::vector<at::Tensor> optimizer_tensors(const std::function<bool(const std::string&)>& select = {});
  /// Calls optimizer.step() and passes its updates on to the module. A plain optimizer.step() works, too: the
  /// engine then passes them on when an operator or a call of the engine uses the module next, or by
  /// notice_update(). Throws LogicError when there is no complete gradient, and when the optimizer did not
  /// touch optimizer_tensors(). Collective.
  void step(torch::optim::Optimizer& optimizer);
  /// Passes on to the module what was written to optimizer_tensors() since the last call, as by a plain
  /// optimizer.step(). To be called before code that the engine does not see reads the module's parameters:
  /// torch::save and data_ptr() find those before the update, unless masters and parameters are the same
  /// memory (fp32 under ddp). Collective when something was written.
  void notice_update();

  /// Forgets the step under way: the gradients of all its micro-batches, reduced or not, and collectives that
  /// were still to come. To be called on all ranks, also after an exception in a forward pass.
  void skip_step();

  /// Whether passes can be recorded (recording.h): their kernels are then launched in place of later passes,
  /// in the order of a step's passes, all kinds of which must be recorded in one and the same step. That
  /// needs a module that announces its units, and ranks that communicate only at the ends of steps, or not
  /// before units are complete.
  bool can_be_recorded() const;
  /// Before the first recording, between steps: from now on parameters stay whole and gradients keep their
  /// memory, also under policies that free them. Collective; all ranks do so, recorded or not.
  void stay_in_place();
  bool stays_in_place() const { return stays_; }
  /// Bytes that stay_in_place() takes on this rank.
  int64_t bytes_to_stay() const;
  /// What the host keeps between two passes of a step, beside the buffers. After launching a recording, call
  /// set_progress() with what progress() returned after the recorded pass. To take back a pass that failed
  /// before any of its kernels ran, call it with what progress() returned before that pass.
  struct Progress {
    std::vector<FlatUnit::Progress> units;
    Completion::Flags used;
    int64_t reductions = 0;
    bool complete = false;
    GradientMean::State mean;
  };
  /// Where the step under way is on this rank, of the host alone: does not wait for the GPU.
  Progress progress() const;
  /// Makes the host go on from `progress`, which progress() of this engine returned; not collective.
  void set_progress(const Progress& progress);
  /// After a recording of a step's last pass was launched: reduces units beside the launch, as it completes
  /// them, and the current stream waits for that. Collective; the order of reductions is that of ranks that
  /// ran the pass.
  void reduce_launched() { executor_.reduce_launched(); }

  /// Local SGD: every rank takes the mean of all ranks' parameters now. step() calls it
  /// HookOptions::local_steps steps after the last average; call it when training ends in between.
  /// Collective.
  void average_parameters();
  /// Throws LogicError when ranks of local SGD have weights of their own.
  void check_together(const char* operation) const;

  /// A scope for forward passes without gradients, with any number of batches a rank (evaluation.h).
  /// Collective. Throws LogicError while another one lives.
  [[nodiscard]] Evaluation evaluate(Keep keep = Keep::kWhole) { return Evaluation(*this, keep); }

  /// Keeps all units unsharded while it lives: for many forward passes in a row without gradients, or where
  /// ranks run passes in different orders. May nest. `form`: the form of the parameters. Code that does not
  /// read their memory itself takes Whole::kAsUsed, which leaves matrices in FP8 where the module multiplies
  /// them so. Constructor and destructor are collective where parameters are sharded.
  class Held {
   public:
    explicit Held(DataParallel& engine, Whole form = Whole::kReadable);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

   private:
    DataParallel& engine_;
  };

  /// Whole weights, one parameter at a time; one unit is gathered at a time.
  class Weights {
   public:
    explicit Weights(DataParallel& engine);
    /// A copy of a whole parameter: fp32, of its shape, on the CPU. Collective. Parameters of one unit that
    /// are asked for in a row gather it once; those of it that are frozen for good are gathered apart.
    at::Tensor whole(const std::string& parameter);

   private:
    at::Tensor whole_frozen(size_t unit, const std::string& parameter);

    DataParallel& engine_;
    std::optional<size_t> gathered_, gathered_frozen_;  ///< units
    at::Tensor master_, frozen_;                        ///< of these units
  };

  /// A whole tensor of which every rank along tp holds the part that `entry` says, `held`, of its shape;
  /// `held` itself where there is nothing to join. Collective over these ranks.
  at::Tensor joined(const plan::FlatEntry& entry, const at::Tensor& held) const;
  /// Whether this rank writes what all ranks of its stage have: the first one along all axes.
  bool is_writer() const { return mesh_.stage->rank() == 0; }

  /// Calls body(name, fp32 CPU tensor) for every parameter in name order, on every rank, but for those that
  /// are frozen for good; one with several names comes once, by its first (aliases()). Gathers one unit at a
  /// time. Collective.
  void visit_weights(const std::function<void(const std::string&, const at::Tensor&)>& body);

  /// Replaces the values of parameters that are frozen for good by those that `values` writes, as
  /// load_values() does those of others.
  void load_frozen(const Initializer& values);
  /// As visit_weights(), for the parameters that are frozen for good (plan::ParamSpec::frozen), unit by unit.
  void visit_frozen(const std::function<void(const std::string&, const at::Tensor&)>& body);

  /// Takes over what code outside the engine has written to parameters of the module (in place, or by
  /// set_data() as torch::load does); every rank must have written the same. Every call that uses parameters
  /// begins with it. Throws LogicError naming a parameter whose dtype, device or shape was changed.
  void take_writes();

  /// Replaces the values of parameters whose names `select` accepts, by those that `values` writes: this rank
  /// reads the elements that it keeps, all of them where parameters are whole. No communication: every rank
  /// loads the same values.
  void load_values(const std::function<bool(const std::string&)>& select, const Initializer& values);

  /// Replaces what the communication hook remembers for the parameters of a unit, an entry for each in their
  /// order. All ranks call it.
  void set_hook_state(size_t unit, const std::vector<HookState>& params);

  const torch::nn::Module& module() const { return module_; }
  torch::nn::Module& module() { return module_; }
  const comm::Mesh& mesh() const { return mesh_; }
  /// The other names of parameters that the module has under several: alias -> name in units().
  const std::map<std::string, std::string>& aliases() const { return aliases_; }
  /// The units, for reading.
  const std::vector<const FlatUnit*>& units() const { return views_; }
  /// Reductions that this rank has begun, one a unit.
  int64_t reductions() const { return executor_.reductions(); }
  /// What this rank does in a step of two micro-batches: the plan at first, then what the module did last.
  const plan::StepProgram& program() const { return programs_.step(); }
  /// From now on runs the passes of `program`, one of this engine's units in which gathers, frees and waits
  /// may come elsewhere than in program(), for steps of `micro_batches`; they are in its order on all ranks.
  /// Passes cannot be recorded then, and parameters not be frozen or thawed. Between steps.
  void run_program(plan::StepProgram program, int64_t micro_batches) {
    programs_.take_step(std::move(program), micro_batches);
  }
  /// This rank's index among the ranks that hold the same part of parameters and optimizer state, and their
  /// count.
  struct Replica {
    int64_t index, count;
  };
  Replica replica() const;
  /// What this rank holds at the end of a step, without the optimizer's moments.
  plan::StateBytes state_bytes() const;
  /// One line: policy, ranks, parameters, units, and how much of the parameters is gathered at once at most.
  std::string summary() const;
  /// summary(), a table of the units with their bytes, and what this rank holds between steps. For people;
  /// the same on all ranks but for the last.
  std::string describe() const;
  /// Bytes of all parameters in the dtype of computation, padding included.
  int64_t whole_bytes() const;
  /// The most of these bytes that a step has whole at once: the root, and the largest units, as many as are
  /// in use or gathered ahead; all of them where the policy keeps parameters whole.
  int64_t most_gathered_bytes() const;
  /// Bytes that this rank has sent so far for gradients and parameters, counted where they are sent
  /// (comm::Group::traffic), without broadcasts, by which ranks agree now and then.
  int64_t sent_bytes() const;
  /// Bytes of device memory that this rank holds outside torch's allocator, for peers to read.
  int64_t symmetric_bytes() const;
  /// Switches the timing of communication on or off. take_times() returns the times since its last call; the
  /// host waits for the device.
  void measure(bool on);
  CommTimes take_times();

 private:
  friend class Evaluation;
  friend class Pipeline;

  plan::EngineSetting setting() const;
  std::vector<std::unique_ptr<FlatUnit>> make_units(const std::vector<plan::UnitSpec>& specs,
                                                    const Initializer& initializer);
  std::optional<StoragePool> symmetric_pool(const std::vector<plan::UnitSpec>& units) const;
  std::vector<comm::Group*> groups() const;
  UnitGroups make_groups() const;
  void watch_use();
  void give_back() noexcept;
  size_t index_of(const std::string& unit) const;
  std::pair<size_t, size_t> place_of(const std::string& parameter) const;
  /// The unit of a parameter that is frozen for good; none: it is not, or is not there.
  std::optional<size_t> unit_of_frozen(const std::string& parameter) const;
  bool is_root(size_t unit) const { return unit == 0 && use_from_ != UseFrom::kBuckets; }
  /// Validation has no backward pass, so a rank without data has nothing of it to repeat.
  bool trains() const { return at::GradMode::is_enabled() && evaluation_ == nullptr; }

  void begin_backward_range(size_t unit);
  void end_backward_range();
  void touched(const std::vector<size_t>& tokens, nn::Nesting nesting);
  void written(size_t token, int64_t offset);
  void use_units(const std::vector<size_t>& units, nn::Nesting nesting);
  void gradient_complete(size_t unit, size_t param);
  void go_back_to_stream(c10::OptionalStreamGuard& guard) const;
  void make_watch();
  void mark_params(size_t unit);
  void watch_updates();
  double begin_micro_batch(double weight, at::ScalarType loss = at::kFloat);
  bool averages_before_hook() const;
  void begin_sums(bool last_micro_batch);
  void differentiate(const at::Tensor& output, const at::Tensor& grad_output, bool last);
  template <typename Body>
  void in_backward(const Body& body);
  void finish_step();
  void complete_gradient();
  double handed_out_norm(const std::vector<std::string>& without) const;
  double norm_of(double squares) const;
  void settle_mean();
  void end_update();
  void unshard_held();
  void check_complete(const char* operation) const;
  void follow_freezing();
  void follow_frozen(optim::Optimizer& optimizer);
  void abandon_step() noexcept;
  void check_output(const at::Tensor& output, bool is_loss) const;
  double loss_share() const;
  void check_alike_along_tp(const at::Tensor& loss);
  void check_usable() const;
  void check_not_evaluating(const char* operation) const;
  void agree_on_order();

  torch::nn::Module& module_;
  Options options_;
  comm::Mesh mesh_;
  UseFrom use_from_;
  UnitGroups groups_;
  bool beside_;         ///< communication runs beside computation
  bool stays_ = false;  ///< stay_in_place() was called
  Shared shared_;
  std::map<std::string, size_t> index_;
  std::map<std::string, std::string> aliases_;
  std::vector<std::unique_ptr<FlatUnit>> units_;
  std::vector<const FlatUnit*> views_;  ///< of units_
  EnginePrograms programs_;
  Executor executor_;
  Completion completion_;
  GradientMean mean_;
  mutable FrozenAlike frozen_alike_;
  std::unique_ptr<nn::TouchWatch> touch_;
  bool params_marked_ = false;  ///< in touch_, not only pieces
  bool order_agreed_ = false;
  bool loss_compared_ = false;  ///< among ranks along tp

  std::vector<size_t> current_;  ///< the units that operators use in forward; none before the first of a pass
  bool in_backward_ = false;
  std::optional<c10::Stream> stream_;  ///< on which backward() was called; none on a CPU
  bool in_backward_range_ = false;     ///< NVTX: a unit is being differentiated
  int64_t steps_apart_ = 0;            ///< local SGD: since ranks had equal weights
  bool complete_ = false;  ///< the gradients of a step's last micro-batch are there, and nobody has used them
  optim::GradScale grad_scale_;  ///< of the last step, whose kernels may still read it

  GroupRule group_rule_;
  Completion::Flags optimized_;       ///< what optimizer_params() was called for; empty: never
  Completion::Flags updated_;         ///< what the optimizer was told to update
  bool pieces_written_ = false;       ///< somebody wrote to optimizer_tensors() since notice_update()
  bool handed_out_ = false;           ///< optimizer_tensors() was called: gradients go there
  int unwinding_;                     ///< exceptions under way when this was made
  Evaluation* evaluation_ = nullptr;  ///< the one that lives
  std::string broken_;  ///< why a failed step could not be forgotten; empty: nothing of the kind
};

/// XXH3-64 of all fp32 master parameters in name order, padding excluded: equal weights, equal digest,
/// whatever the layout. Collective; the same text on every rank.
std::string weights_digest(DataParallel& engine);

}  // namespace trireme::parallel
