#pragma once
// A report on one step of a pipeline, from events that its ranks recorded: how busy they were, why they were
// idle, what they held and sent; beside it the simulator's prediction for the measured costs.
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "trireme/plan/lowering.h"
#include "trireme/plan/simulate.h"

namespace trireme::plan {

/// Something that a rank did, in seconds of a clock that all ranks share.
struct StageEvent {
  /// One of kPassKinds; kSend: a message is handed to its link; kRecv: the rank waits for one; kReduce: of
  /// gradients, after all passes; kUpdate.
  ActionKind kind = ActionKind::kForward;
  int64_t stage = 0;        ///< of a message that of the pass that needs it
  int64_t micro_batch = 0;  ///< likewise
  Message message = Message::kActivation;
  double begin = 0.0, end = 0.0;
  /// Size of a message. For a pass, the growth of the memory that the rank's passes hold; for kBackwardInput,
  /// the memory that it has left for kBackwardWeight.
  double bytes = 0.0;

  bool is_pass() const { return computes(kind); }
  StagePass pass() const { return {kind, stage, micro_batch}; }
};

/// By rank, in the order in which each did them.
using StageEvents = std::vector<std::vector<StageEvent>>;

/// Why a rank runs no pass. Each gap is as long as in the step that equal stages would have, and longer by
/// what has delayed the pass behind it, on this rank or on one that it waits for.
enum class IdleCause {
  kSchedule,       ///< as in a step in which all stages take what they take on average, and nothing else does
  kImbalance,      ///< stages, or passes of one, that take longer than others
  kCommunication,  ///< messages on their way, and sends that block
  kHost            ///< a rank that has all it needs and does not begin
};
inline constexpr size_t kIdleCauses = 4;
std::string_view name(IdleCause cause);

/// A gap has one for each of its causes, one behind the other: their lengths are measured, their order is
/// not.
struct IdleSpan {
  double begin = 0.0, end = 0.0;
  IdleCause cause = IdleCause::kSchedule;
};

struct RankUse {
  double busy = 0.0;                              ///< seconds in passes
  double idle = 0.0;                              ///< the rest of the step
  std::array<double, kIdleCauses> idle_causes{};  ///< sum to idle; 0 in predictions
  double peak_bytes = 0.0;                        ///< of activations of micro-batches in flight
  double sent_bytes = 0.0;
};

struct StageUse {
  double busy = 0.0;  ///< seconds in its passes; of two copies the mean
  /// The most micro-batches for which the input of the stage's pass was made and the pass had not begun. The
  /// first stage's forward passes have no queue.
  int64_t forward_queue = 0, backward_queue = 0;
};

struct StepUse {
  double seconds = 0.0;  ///< from the first event to the end of the last pass
  std::vector<RankUse> ranks;
  std::vector<StageUse> stages;
  /// The share of all ranks' time in which they were idle.
  double idle_share() const;
};

struct PipelineReport {
  Schedule schedule;
  Schedule simulated;  ///< the same, or that of which the schedule has all passes on one rank
  StageEvents events;  ///< measured; the first begins at 0
  std::vector<std::vector<IdleSpan>> idle;  ///< by rank, in the order of time
  StepUse measured;
  PassCosts costs;             ///< of each stage: medians, in seconds
  StageEvents ideal;           ///< simulated for these costs
  StepUse predicted;           ///< of `ideal`
  double after_s = 0.0;        ///< from the end of the last pass to that of the last reduction or update
  double clock_error_s = 0.0;  ///< by which clocks of ranks may differ
};

/// Throws LogicError when the passes of `events` are not those of the schedule in its order.
PipelineReport report_step(const Schedule& schedule, StageEvents events);
/// With a prediction for another schedule of the same stages (on_one_rank()).
PipelineReport report_step(const Schedule& schedule, StageEvents events, const Schedule& simulated);

/// Seconds before and after a meeting of all ranks, on the rank's own clock: nobody leaves before all have
/// come.
struct Meeting {
  double entered = 0.0, left = 0.0;
};

struct ClockOffset {
  double seconds = 0.0;  ///< to be added to the rank's clock to get that of rank 0
  double error = 0.0;    ///< at most
};

/// The offset of every rank's clock, from the times that each rank noted of the same meetings:
/// [rank][meeting].
std::vector<ClockOffset> clock_offsets(const std::vector<std::vector<Meeting>>& seen);

}  // namespace trireme::plan
