// Passes and messages of stages as text, one line an action.
#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/plan/lowering.h"

namespace trireme::plan {
namespace {

constexpr std::string_view kMessageLetters = "FBHPT";
static_assert(kMessageLetters.size() == kNames<Message>.size());

/// That of the schedule's text.
char letter_of(ActionKind pass) {
  switch (pass) {
    case ActionKind::kForward:
      return 'F';
    case ActionKind::kBackward:
      return 'B';
    case ActionKind::kBackwardInput:
      return 'I';
    case ActionKind::kBackwardWeight:
      return 'W';
    default:
      throw LogicError("[plan.stage_text] {} is no pass of a stage", pass);
  }
}

}  // namespace

char letter_of(Message message) {
  return kMessageLetters[static_cast<size_t>(message)];
}

std::string stage_text(const Action& action) {
  const char letter = action.is_message() ? letter_of(action.message) : letter_of(action.kind);
  std::string text = fmt::format("{} {}{}{}", action.kind, action.stage, letter, action.micro_batch);
  if (!action.is_message()) return text;
  const bool sends = action.kind == ActionKind::kSend;
  text += fmt::format(" {} {}", sends ? "to" : "from", action.peer);
  return sends ? text : text + fmt::format(" in {}", action.buffer);
}

std::string stage_text(const StageActions& actions) {
  std::string text;
  for (const Action& action : actions) text += stage_text(action) + '\n';
  return text;
}

}  // namespace trireme::plan
