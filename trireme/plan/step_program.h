#pragma once
// What one rank does in one step, as data: its buffers, with the time in which each has memory, and its
// actions in the order in which they are issued. parallel/executor.h interprets it; memory and bytes on the
// wire are counted from it; verify() says what is wrong with one.
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/action_kind.h"
#include "trireme/plan/cost.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/unit_buffers.h"

namespace trireme::plan {

/// Actions of a lane run one after the other; lanes run beside each other where communication has streams of
/// its own.
enum class Lane { kCompute, kUnshard, kReduce, kSend, kRecv };
template <>
inline constexpr auto kNames<Lane> = std::to_array<std::string_view>({"compute", "unshard", "reduce", "send",
                                                                      "recv"});

/// Tensors that travel between two stages.
enum class Message {
  kActivation,  ///< a stage's output, to the next stage
  kGradient,    ///< the gradient of a stage's input, to the stage before
  // Between the last stage and a part of a head that is spread:
  kHidden,  ///< the last stage's output, to the part
  kPart,    ///< what the part makes of it, to the last stage
  kTotals   ///< what all parts make of it together, back to the part
};
template <>
inline constexpr auto kNames<Message> = std::to_array<std::string_view>({"activation", "gradient", "hidden",
                                                                         "part", "totals"});

/// Which ranks of a mesh a transfer is among.
enum class Along {
  kData,  ///< of a parameter's shards and gradients, and of all that the other axes of data do; stages
  kTp,    ///< ranks that have parts of the same layers: activations, and gradients of copies
  kCp     ///< ranks that have tokens of the same sequences: what attention takes and gives
};
template <>
inline constexpr auto kNames<Along> = std::to_array<std::string_view>({"data", "tp", "cp"});

/// A collective of an action, or a message. `bytes` are sent by this rank.
struct Transfer {
  Collective collective = Collective::kAllGather;
  int64_t ranks = 1;
  int64_t bytes = 0;
  Along along = Along::kData;
  bool operator==(const Transfer&) const = default;
};

struct Action {
  static constexpr int64_t kWholeModel = -1;  ///< as unit: all of them
  static constexpr int64_t kOnceAStep = -1;   ///< as micro-batch

  ActionKind kind = ActionKind::kForward;
  int64_t unit = kWholeModel;
  int64_t micro_batch = kOnceAStep;
  Lane lane = Lane::kCompute;
  std::vector<Transfer> transfers = {};
  int64_t awaits = -1;  ///< kWait: the action that must have run, a place in StepProgram::actions
  // Of pipelines.
  int64_t stage = 0;  ///< of a pass, or the one whose pass needs the message; a part's messages have the part
  Message message = Message::kActivation;  ///< kSend, kPost, kRecv
  int64_t peer = -1;                       ///< rank of the pipeline that sends or receives; -1: no message
  int64_t buffer = -1;                     ///< kPost, kRecv: one of those for this stage and kind of message
  bool operator==(const Action&) const = default;

  /// Whether it is a forward or backward pass of a unit, or a part of one.
  bool computes() const { return plan::computes(kind); }
  /// Whether it is one end of a message between stages.
  bool is_message() const { return peer >= 0; }
  int64_t wire_bytes() const;
  std::vector<Transfer> transfers_along(Along along) const;
};

/// What a buffer holds.
enum class Role {
  kParameters,   ///< whole, in the dtype of computation
  kShard,        ///< this rank's part of them
  kSlice,        ///< what neighbouring ranks keep of them between forward and backward
  kMaster,       ///< fp32
  kMoments,      ///< optimizer state
  kGradients,    ///< whole, in the dtype of computation
  kSum,          ///< fp32 gradients, to which all micro-batches of a step are added
  kReduced,      ///< fp32 sum over the ranks
  kActivations,  ///< of a unit and a micro-batch, kept for backward or for its second half
  kBoundary      ///< what stages send each other
};
template <>
inline constexpr auto kNames<Role> = std::to_array<std::string_view>({"parameters", "shard", "slice",
                                                                      "master", "moments", "gradients", "sum",
                                                                      "reduced", "activations", "boundary"});

/// Memory of a role, for one stretch of the step. Memory that comes and goes several times has an entry for
/// each time.
struct Buffer {
  static constexpr int64_t kAlways = -1;

  Role role = Role::kParameters;
  int64_t unit = 0;
  int64_t micro_batch = Action::kOnceAStep;
  int64_t bytes = 0;
  std::optional<Role> part_of = {};  ///< it lies in the unit's buffer of that role and adds no memory
  /// The buffer gets its memory before action `from` and loses it after action `to`; kAlways: it has memory
  /// from step to step. from > to: it has memory from `from` to the end of the step, and on to `to` of the
  /// next step.
  int64_t from = kAlways, to = kAlways;
  bool operator==(const Buffer&) const = default;

  bool is_kept() const { return from == kAlways; }
  bool has_memory_at(int64_t action) const;
};

/// Actions that belong together: the way of a micro-batch through the units of a stage and back, or the
/// update.
struct Pass {
  /// kReduce: of gradients that earlier passes have left. kTransfer: units that stay whole are gathered or
  /// freed. kSumTied: of what all passes of this rank have left.
  enum class Kind {
    kForward,
    kBackward,
    kBackwardInput,
    kBackwardWeight,
    kUpdate,
    kTransfer,
    kReduce,
    kSumTied
  };
  Kind kind = Kind::kForward;
  int64_t micro_batch = Action::kOnceAStep;
  int64_t begin = 0, end = 0;  ///< in StepProgram::actions
  int64_t stage = 0;           ///< of a pipeline
  bool operator==(const Pass&) const = default;
};
template <>
inline constexpr auto kNames<Pass::Kind> = std::to_array<std::string_view>(
    {"forward", "backward", "backward_input", "backward_weight", "update", "transfer", "reduce", "sum_tied"});

/// The kind of the actions by which a pass computes; none: it computes nothing.
std::optional<ActionKind> computing(Pass::Kind pass);

/// A unit as far as a step is concerned.
struct ProgramUnit {
  std::string name;
  int64_t numel = 0;  ///< of its flat layout, padding included
  bool trainable = true;
  int64_t activation_bytes = 0;  ///< of a micro-batch, kept for backward; 0 where it is not known
  /// Kept by a micro-batch from the first to the second half of its backward pass, where that has two.
  int64_t between_halves_bytes = 0;
  std::optional<Fp8Unit> fp8 = {};
  int64_t uses = 1;  ///< forward passes of a micro-batch through it
  int64_t frozen =
      0;  ///< elements that are frozen for good, beside those of its flat layout; padding included
  std::optional<Nf4Unit> nf4 = {};
  bool tied = false;  ///< it is trained, and one of its parameters has a copy in another stage
  bool operator==(const ProgramUnit&) const = default;
};
/// Units as `setting` lays them out; `activation_bytes`: one number for each unit, or empty.
std::vector<ProgramUnit> program_units(const std::vector<UnitSpec>& units, const EngineSetting& setting,
                                       const std::vector<int64_t>& activation_bytes = {});

struct StepProgram {
  std::vector<ProgramUnit> units;
  std::vector<Buffer> buffers;
  std::vector<Action> actions;
  std::vector<Pass> passes;
  bool operator==(const StepProgram&) const = default;

  /// Micro-batches of a program that stands for a longer step: the one in the middle stands for any number of
  /// them.
  static constexpr int64_t kMicroBatchesShown = 3;
  int64_t wire_bytes() const;
  /// Bytes sent in a step of `micro_batches`, of which this program has all or kMicroBatchesShown; limited to
  /// what 64 bits hold.
  int64_t wire_bytes(int64_t micro_batches) const;
};

/// How a micro-batch goes through a module.
struct UseOrder {
  struct Event {
    enum class Kind {
      kBegin,     ///< backward reaches the unit
      kComplete,  ///< the gradients of its parameters are complete
      kEnd        ///< backward has left it
    };
    Kind kind = Kind::kBegin;
    int64_t unit = 0;
    bool operator==(const Event&) const = default;
  };
  std::vector<int64_t> forward;  ///< units in the order of their use; one may come several times
  std::vector<Event> backward;
  /// Trainable units in the order in which all ranks reduce them; empty: as they are complete.
  std::vector<int64_t> reductions;
  bool operator==(const UseOrder&) const = default;
};
/// Units one after the other, and back. Buckets, which follow no order of the module, are complete in the
/// order of the list.
UseOrder declared_order(const std::vector<ProgramUnit>& units, UseFrom use_from);

/// How many reductions run beside computation before it waits for the oldest: more would only hold more
/// gradients.
inline constexpr int64_t kReductionsInFlight = 2;

/// The program of a step of setting.accumulation micro-batches, forward and backward of each in turn, then
/// the update.
StepProgram step_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                         const UseOrder& order);
/// A pass of all units of an engine.
struct EnginePass {
  ActionKind kind = ActionKind::kForward;  ///< one of kPassKinds, or kReduce
  int64_t micro_batch = Action::kOnceAStep;
  bool last = false;  ///< kBackward: gradients are complete with it, and are reduced meanwhile
};
/// The program of an engine whose passes come in an order of their own, as those of a stage of a pipeline do,
/// then the update. `held`: parameters stay whole from the first pass to the last.
StepProgram step_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                         const UseOrder& order, const std::vector<EnginePass>& passes, bool held);
/// A forward pass alone, without gradients: units are freed as soon as they were used.
StepProgram inference_program(const std::vector<ProgramUnit>& units, const EngineSetting& setting,
                              const UseOrder& order);

/// Bytes that a rank sends in a step of `micro_batches`, as StepProgram::wire_bytes() has it; with local SGD
/// in a step that averages. None where the hook's are in no formula (topk, powersgd), or where it cannot be
/// combined with the policy.
std::optional<int64_t> sent_bytes(const StepProgram& program, const EngineSetting& setting,
                                  int64_t micro_batches);

/// Bytes by role, of a rank at one moment.
struct HeldBytes {
  std::array<int64_t, kNames<Role>.size()> by_role{};
  int64_t& operator[](Role role) { return by_role[static_cast<size_t>(role)]; }
  int64_t operator[](Role role) const { return by_role[static_cast<size_t>(role)]; }
  int64_t total() const;
};
/// Bytes of the buffers that have memory from step to step.
HeldBytes kept_bytes(const StepProgram& program);
/// Bytes of the buffers that have memory while an action is issued, by action.
std::vector<HeldBytes> held_bytes(const StepProgram& program);

/// Why the passes of `program` cannot be recorded and launched again, naming the first action in the way;
/// empty: they can. A recording repeats kernels on the same memory, so nothing in a pass may wait for other
/// ranks or move memory. Two things are no obstacle: reductions in the last backward pass of a step, which
/// run beside the launch, and gathers of parameters, which then stay whole and are gathered after the update.
std::string recording_obstacle(const StepProgram& program);

/// Whether the bytes of all buffers, and those of all transfers, add up within 64 bits; then every sum
/// counted from them fits, too.
bool has_countable_bytes(const StepProgram& program);

/// Throws LogicError naming the first action that uses a buffer without memory or parameters that other ranks
/// have changed meanwhile, reduces gradients that are not complete, updates elements of which this rank has
/// no sum over the ranks, or comes twice; a buffer that is there twice; or what breaks a law of the step as a
/// whole (check_step_laws()).
void verify(const StepProgram& program);

/// One line a unit, buffer, pass and action; columns line up. step_program_from_text() reads it back.
std::string to_text(const StepProgram& program);
/// The program that such a text describes, with its actions in the order of their lines, numbered anew.
/// Throws ConfigError that names a line that cannot be read; verify() checks the rest.
StepProgram step_program_from_text(std::string_view text);

}  // namespace trireme::plan
