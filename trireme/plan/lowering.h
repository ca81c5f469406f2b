#pragma once
// A pipeline schedule with its messages: what one rank runs, sends and receives in a step, in an order in
// which no rank waits for ever. Stages that follow each other on one rank hand over without a message.
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/plan/schedule.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {

/// The passes of a rank's stages, each one action for all units of its stage, and the messages between them,
/// in their order.
using StageActions = std::vector<Action>;

/// The program of `rank`. A receive buffer is in use from its post to its last use (LastUse). A stage has as
/// many as the schedule needs at once, and up to `ahead` more, so that messages arrive before they are
/// needed. Each rank posts what another sends in the order of its sends. Throws ConfigError as simulate() for
/// a schedule that cannot run, LogicError for a rank that it lacks.
StageActions lower(const Schedule& schedule, int64_t rank, int64_t ahead = 1);
/// The programs of all ranks, in less time.
std::vector<StageActions> lower_all(const Schedule& schedule, int64_t ahead = 1);

/// The same for forward passes alone (forward_only()): a receive buffer is in use to the end of its pass.
StageActions lower_forward(const Schedule& forwards, int64_t rank, int64_t ahead = 1);

/// What a pass makes for stages of other ranks, or of its own: a message each, in the order in which they
/// leave.
struct StageEdge {
  Message message = Message::kActivation;
  int64_t stage = 0;         ///< as a message has it
  int64_t from = 0, to = 0;  ///< stages
};
std::vector<StageEdge> made_by(const Schedule& schedule, const StagePass& pass);
/// What it needs of them.
std::vector<StageEdge> needed_by(const Schedule& schedule, const StagePass& pass);

/// The receive buffers of a stage for one kind of message.
using Pool = std::pair<int64_t, Message>;

/// Of which pools a pass is the last to use the buffer of its micro-batch. Parts of the head have served when
/// the last stage has the gradient of its output; others to the end of the last backward pass of their stage,
/// or of the forward pass where there are no others.
class LastUse {
 public:
  /// `schedule` must outlive this.
  explicit LastUse(const Schedule& schedule);
  std::vector<Pool> of(const Action& pass) const;
  bool trains() const { return trains_; }

 private:
  const Schedule& schedule_;
  bool trains_ = false;
};

/// How many receive buffers a program uses.
std::map<Pool, int64_t> receive_buffers(const StageActions& program);

/// Whether a rank goes on behind a send at once, or when the receiver has posted the message.
enum class Sends { kAtOnce, kWhenPosted };

/// Runs the programs of all ranks against each other. Throws LogicError that names the first action that
/// sends or takes what is not there, uses a buffer that is taken, meets a message out of order, or waits for
/// ever (forward_only() ends with forward passes); also when passes are not those of the schedule or
/// something that was sent is never taken.
void check_programs(const Schedule& schedule, const std::vector<StageActions>& programs,
                    Sends sends = Sends::kAtOnce);

/// Letter of a message in text.
char letter_of(Message message);
/// "recv 2F3 from 1 in 0": F is an activation or a forward pass, B a gradient or a backward pass; H, P and T
/// are what a head that is spread sends: hidden states, parts, totals.
std::string stage_text(const Action& action);
/// One line an action.
std::string stage_text(const StageActions& actions);

}  // namespace trireme::plan
