#pragma once
// A group of parameters that lives in flat buffers: unsharded, reduced and updated together. Those that are
// frozen for good (plan::ParamSpec::frozen) have a buffer of their own; all else here is about the others.
// Module parameters are views into the flat parameter buffer and their gradients views into the flat gradient
// buffer, so collectives work on the memory that the module uses, without copies in or out.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/fp8_weights.h"
#include "trireme/parallel/frozen_part.h"
#include "trireme/parallel/options.h"
#include "trireme/parallel/side_stream.h"
#include "trireme/parallel/storage.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/memory.h"

namespace trireme::parallel {

struct UnitGroups {
  std::shared_ptr<comm::Group> shard;      ///< one shard of the unit each
  std::shared_ptr<comm::Group> replicate;  ///< ranks with the same shard; often a group of one
  std::shared_ptr<comm::Group>
      after_forward;  ///< ranks that share the parameters between forward and backward; none: `shard`
  std::shared_ptr<comm::Group> tp;  ///< among which are the copies of parameters (plan::Part::copies)
};

/// What the units of an engine share.
struct Shared {
  SideStream unshard, reduce;
  StoragePool storage;
  StoragePool sums;                      ///< for gradients that were reduced
  std::optional<StoragePool> symmetric;  ///< for gradients that the ranks of `shard` read in place
  /// Whether the module multiplies in FP8 now, where it does at all: evaluation is in the dtype of
  /// computation.
  std::function<bool()> in_fp8;
  optim::GradScale before_hook = {};  ///< what gradients are multiplied by before a hook makes them smaller
  std::string remark = {};            ///< what the step's collectives say beside the unit, for errors
  StoragePool& gradients() { return symmetric ? *symmetric : storage; }
};

/// In which form the parameters of a unit are whole. Where nothing is gathered in FP8 both are the same.
enum class Whole {
  kAsUsed,   ///< as the module multiplies now, in FP8 or not
  kReadable  ///< in the dtype of computation
};

class FlatUnit {
 public:
  /// Takes over `params` (name and leaf tensor, those of `spec` in its order): their data and gradients
  /// become views of flat buffers. `shared` must outlive this. Collective.
  FlatUnit(const plan::UnitSpec& spec, std::vector<std::pair<std::string, at::Tensor>> params,
           const Options& options, const plan::EngineSetting& setting, UnitGroups groups, Shared& shared,
           const Initializer& initializer);

  const std::string& name() const { return name_; }
  const plan::FlatLayout& layout() const { return layout_; }
  /// Those that may be trained. All are views of one flat buffer, whose storage is empty while the parameters
  /// are not whole.
  const std::vector<std::pair<std::string, at::Tensor>>& params() const { return params_; }
  /// What the communication hook remembers, by params().
  std::vector<HookState> hook_state() const;
  void set_hook_state(const std::vector<HookState>& params);

  /// Whether the parameters are whole on this rank in `form`, or about to be. Readable ones also serve as
  /// used: layers then cast them themselves.
  bool is_whole(Whole form = Whole::kAsUsed) const {
    if (layout_.numel() == 0 && frozen_) return frozen_->is_whole();
    return has_storage(full_params_) || (in_bytes(form) && has_storage(fp8_->whole()));
  }
  const std::optional<plan::Fp8Unit>& fp8() const { return fp8_unit_; }
  const std::optional<plan::Nf4Unit>& nf4() const { return nf4_unit_; }
  const plan::UnitBuffers& buffers() const { return buffers_; }
  /// Null: no parameter is frozen for good.
  const FrozenPart* frozen() const { return frozen_.get(); }
  /// Replaces the values of parameters that are frozen for good, between steps. No communication.
  void load_frozen(const Initializer& values);
  /// The place of one of these parameters in the layout of frozen(); null: none of them has that name.
  const plan::FlatEntry* frozen_entry(const std::string& parameter) const;
  /// All parameters that are frozen for good, as FrozenPart::gathered(). Collective where they are sharded.
  at::Tensor whole_frozen() const;
  /// One of them, which frozen_entry() has found, of what whole_frozen() returned.
  at::Tensor frozen_value(const at::Tensor& gathered, const plan::FlatEntry& entry) const;
  /// Calls `body` with the names and values, of their shapes and on the device, of parameters that are frozen
  /// for good. Collective for policies that shard parameters.
  void visit_frozen(const std::function<void(const plan::FlatEntry&, const at::Tensor&)>& body) const;
  /// Whether any of its parameters requires a gradient.
  bool trainable() const;
  /// Whether this rank has no others to reduce with: its gradients are used as they are, and no memory moves.
  bool is_alone() const { return alone_; }

  /// Begins to all-gather the parameters, unless they are whole or about to be. Collective for policies that
  /// shard them.
  void start_unshard(Whole form = Whole::kAsUsed);
  /// start_unshard(), and the current stream waits for it.
  void unshard(Whole form = Whole::kAsUsed);
  /// Frees the whole parameters under policies that shard them; after forward as far as the policy says.
  void reshard();
  void reshard_after_forward();
  /// From now on, as the setting `staying` has it, for recordings of passes: parameters stay whole, and are
  /// gathered after each update; gradients and their sum keep their memory. Between steps. Collective.
  void stay_in_place(const plan::EngineSetting& staying);
  /// Bytes that stay_in_place() would take.
  int64_t bytes_to_stay() const;

  /// Before a backward pass: drops what others have left in grad() of parameters, unless this step has
  /// gradients already. `last`: it is the last pass of a step.
  void begin_backward(bool last);
  /// Allocates the full gradients and lends them to the parameters, unless this step has gradients already.
  /// Where gradients are bf16 or fp16 and several micro-batches are added up in fp32, it lends that fp32 sum
  /// instead.
  void prepare_gradients();
  /// The gradient of parameter `index` is complete: copies it to its place unless it was computed there.
  void take_gradient(size_t index);
  /// After a backward pass, on the stream of reductions: sums gradients over the ranks into this rank's fp32
  /// range, at the end of a step or after every micro-batch as the options say. Collective when it reduces.
  void start_reduce(bool last_micro_batch);
  /// Whether a reduction is put off to start_launched_reduce(): the pass is being recorded, and other ranks
  /// take part.
  bool puts_reduction_off() const;
  /// Starts the reduction of a last micro-batch whose pass was launched as a recording; it runs as soon as
  /// the launch has completed the gradients. Collective.
  void start_launched_reduce();
  /// The current stream waits for the reduction; the policy's gradients are freed.
  void finish_reduce();
  /// Ranks that update all of the unit gather its sum; finish_reduce() does not wait for it. Collective.
  void gather_sum();
  /// The current stream waits for that sum, if there is one; optimizer_param() has gradients only then.
  void wait_for_sum();

  /// fp64 scalar on the device: sum of squares of the reduced gradient over this rank's piece. The pieces of
  /// all ranks make up the unit. Under local SGD a rank's piece is its whole gradient, and its squares are
  /// divided by the number of ranks. Valid after finish_reduce() of the last micro-batch.
  const at::Tensor& grad_squares() const { return grad_squares_; }
  /// The same over parameter `index` alone, until parameters are used again.
  at::Tensor grad_squares_of(size_t index) const;
  /// The gradient accumulated on this rank for parameter `index`: fp32, of its shape, in place. Throws
  /// LogicError when nothing was accumulated.
  at::Tensor accumulated_gradient(size_t index) const;
  /// A parameter whose reduced gradient is not finite in this rank's range; empty: none, or parameters have
  /// been used since.
  std::string nonfinite_parameter() const;

  /// What the optimizer updates on this rank: parameters that require gradients, in the groups of `rule`;
  /// none: ParamSpec::decays says what decays.
  optim::FlatParam optimizer_param(const GroupRule& rule = {}) const;
  std::vector<optim::Segment> segments(const GroupRule& rule) const;
  /// As DataParallel::round_as(), for parameter `index`.
  void round_as(size_t index, const std::string& name, int64_t first);

  /// This rank's part of the fp32 master of a parameter, for optimizers that take tensors: whole and of the
  /// parameter's shape, or a range of it, (n), which may be empty.
  struct Piece {
    size_t param;  ///< in params()
    at::Tensor master;
  };
  /// Makes pieces(): one for each parameter, on every rank.
  void make_pieces();
  const std::vector<Piece>& pieces() const { return pieces_; }
  /// After the last micro-batch: waits for the sum, multiplies it by `factor` and shows it as the fp32 grad()
  /// of pieces whose parameters require gradients.
  void show_piece_gradients(const optim::GradScale& factor);
  /// Multiplies what show_piece_gradients() showed.
  void scale_piece_gradients(double factor);
  /// As grad_squares() and grad_squares_of(), of the gradients that pieces have now.
  at::Tensor piece_grad_squares() const;
  at::Tensor piece_grad_squares_of(size_t index) const;
  void hide_piece_gradients();
  /// Takes over what was written to the pieces on the current stream. Returns the event behind it.
  SideStream::Event take_pieces();
  /// Ends the step without an update: gradients are forgotten, reduced or not.
  void drop_gradients();
  /// After the last backward pass, for a unit that is frozen: nothing of earlier steps or micro-batches is
  /// left.
  void clear_gradients();
  /// Ends the step: the module sees the parameters as they are at the event `updated`. What is whole has
  /// the values before it until it is freed (reshard()) or gathered again (gather_update()).
  void end_step(const SideStream::Event& updated = {});
  /// Begins to all-gather what each rank has updated into parameters that stay whole. Collective.
  void gather_update();
  /// The event at the end of the last update.
  const SideStream::Event& updated() const { return updated_; }

  /// What the host knows of a step between two of its passes.
  struct Progress {
    at::Tensor whole_sum;
    bool gradients_live = false, reduced_any = false;
  };
  Progress progress() const { return {whole_sum_, gradients_live_, reduced_any_}; }
  /// Sets what progress() returned between two other passes.
  void set_progress(const Progress& progress);

  /// Local SGD: the mean over the ranks replaces every rank's parameters. Collective.
  void average_parameters();

  /// The range of the flat buffers that this rank updates, and whose fp32 master and optimizer state it
  /// keeps.
  plan::Range optimizer_range() const;
  /// The elements of parameter `index` in it, counted as there; often none.
  plan::Range owned_part(size_t index) const;
  /// This rank's fp32 master of optimizer_range(). What others wrote to parameters is in it after
  /// take_writes().
  const at::Tensor& master() const { return master_; }
  /// Ranges like optimizer_range() of all ranks, put together (layout().numel()) on every rank; `local`
  /// itself where the policy keeps them whole. Collective.
  at::Tensor gather(const at::Tensor& local) const;
  /// gather() of the master, with what others have written. Collective.
  at::Tensor full_master();

  /// Takes over what code outside the engine has written to parameters since the last call: copies it to this
  /// rank's master, and to what is gathered from that. The other parameters keep their masters. Every rank
  /// must have written the same.
  void take_writes();
  /// The next take_writes() takes over the parameter at element `offset` of the unit.
  void note_write(int64_t offset);
  /// Whether parameter `index` is a view of the unit: set_data() may have given it other memory.
  bool is_in_place(size_t index) const;
  /// Takes over the values of a parameter that is not in place, as after torch::load, and makes it a view
  /// again. Throws LogicError naming it when its dtype, device or shape has changed.
  void take_replaced(size_t index);
  /// Replaces the values of parameter `index`: this rank reads the elements that it keeps, all of them where
  /// parameters are whole. No communication: every rank loads the same values.
  void load(size_t index, const Initializer& values);
  /// Gives every parameter memory of its own, in the dtype that it had at first, with the master's values.
  /// Collective for policies that shard the master; with `may_gather` false nothing is gathered, and
  /// parameters that are not whole here stay as they are. Ends the use of this unit.
  void give_back(bool may_gather);
  /// From now on using the memory of parameters that are not whole throws with `reason`.
  void refuse_use(const std::string& reason);

  /// What this rank holds at the end of a step; moments are the optimizer's.
  plan::StateBytes state_bytes() const;

  /// Whether this rank trains alone between averages: its weights then, and its moments always, are its own.
  bool reduces_locally() const { return options_.hook.hook == Hook::kLocalSgd; }

 private:
  bool shards_parameters() const { return buffers_.keeps_shard; }
  bool come_and_go() const { return buffers_.parameters_come_and_go; }
  bool fp32_compute() const { return options_.compute == at::kFloat; }
  bool reduces_once() const { return options_.reduce_when == ReduceWhen::kOncePerStep; }
  bool keeps_gradients() const { return buffers_.gradients_stay; }
  plan::Range shard_range() const;
  at::Tensor shard_of(const at::Tensor& flat) const;
  at::Tensor piece_of_shard(const at::Tensor& shard) const;
  at::Tensor view_of(const at::Tensor& flat, size_t index) const;
  /// Where parameter `index` has its values as the module sees them, if they have memory.
  at::Tensor place_of(size_t index) const;
  bool has_values(size_t index) const { return has_storage(full_params_) || (fp8_ && fp8_->is_whole(index)); }
  /// The subject of a collective of a step, in words; ranks compare them where they share memory.
  std::string subject() const { return name_ + shared_.remark; }
  std::string refusal(const std::string& reason) const;
  bool in_bytes(Whole form) const { return fp8_ && form == Whole::kAsUsed && shared_.in_fp8(); }
  at::Tensor kept_shard(bool in_bytes) const;
  void gather_own(at::Tensor& whole, bool in_bytes);
  at::Tensor compute_copy() const;
  void allocate_buffers();
  at::Tensor symmetric_zeros(int64_t count, at::ScalarType dtype) const;
  void adopt();
  void wait_for_update();
  void finish_unshard();
  bool has_writes() const;
  void note_versions();
  void check_replacement(size_t index) const;
  void take_values(size_t index, const at::Tensor& values, int64_t first);
  const at::Tensor& gradients() const { return whole_sum_.defined() ? whole_sum_ : full_grads_; }
  void show_gradients();
  void clear_unwritten();
  void fill_master(const Initializer& initializer);
  at::Tensor reduced_shard() const;
  void forget_gradients();
  at::Tensor wire_gradients();
  void reduce_over_ranks(at::Tensor& shard, const at::Tensor& wire);
  void reduce(bool last_micro_batch);
  void take_local_gradients(bool last_micro_batch);
  plan::Range measured_range() const;
  void measure(at::Tensor& squares, const plan::Range& part) const;
  void measure_gradient();
  void measure_counted(at::Tensor& squares) const;
  void sum_copies();
  bool shows_reduced() const;

  /// Of a parameter, what decides how optimizers round its state.
  struct RoundedAs {
    uint64_t key;   ///< of the name
    int64_t first;  ///< place of its first element
  };

  std::string name_;
  std::vector<std::pair<std::string, at::Tensor>> params_;
  Options options_;
  UnitGroups groups_;
  Shared& shared_;
  plan::FlatLayout
      layout_;  ///< in pieces, one a data-parallel rank; a shard is as many as there are replicas
  std::optional<plan::Fp8Unit> fp8_unit_;
  std::optional<plan::Nf4Unit> nf4_unit_;
  plan::UnitBuffers buffers_;
  bool alone_;
  bool gathers_update_;  ///< EngineSetting::gathers_update()

  std::unique_ptr<Fp8Weights> fp8_;  ///< nothing: all is gathered in the dtype of computation
  std::unique_ptr<FrozenPart> frozen_;

  at::Tensor full_params_;  ///< (numel) compute dtype; its storage may be freed
  at::Tensor full_grads_;   ///< (numel) compute dtype; its storage may be freed
  at::Tensor whole_sum_;    ///< (numel) fp32: what gradients are added to in a step of several micro-batches,
                            ///< where full_grads_ is bf16 or fp16; undefined: full_grads_
  at::Tensor master_;       ///< optimizer_range(), fp32; may be a part of full_params_
  at::Tensor compute_shard_;  ///< (shard) what all-gather sends when parameters are sharded; may be master_;
                              ///< undefined with fp8_
  at::Tensor forward_slice_;  ///< what this rank keeps between forward and backward for after_forward;
                              ///< undefined: nothing
  at::Tensor reduced_;        ///< optimizer_range(), fp32; may be a part of full_grads_
  at::Tensor grad_squares_;
  std::vector<at::ScalarType> wrapped_dtypes_;  ///< of parameters before they were the engine's
  std::vector<int64_t> versions_;               ///< of parameters when their values were the master's
  std::vector<bool> written_;                   ///< parameters written to past their version
  std::vector<RoundedAs> rounded_as_;           ///< by params()
  std::unique_ptr<Compressor> compressor_;
  std::vector<Piece> pieces_;

  SideStream::Event unsharded_, reduced_event_, sum_gathered_, updated_;
  SideStream::Event complete_;    ///< of the gradients, in a launched recording
  bool unsharding_ = false;       ///< somebody has to wait for unsharded_
  bool reducing_ = false;         ///< somebody has to wait for reduced_event_
  bool adds_up_ = false;          ///< other micro-batches of the step follow the one under way
  bool gradients_live_ = false;   ///< gradients() holds what was not reduced yet, or is lent for it
  bool reduced_any_ = false;      ///< reduced_ holds a sum of this step
  bool ends_step_ = false;        ///< the reduction under way is the step's last
  bool update_recorded_ = false;  ///< a recording of this step waits for updated_
};

}  // namespace trireme::parallel
