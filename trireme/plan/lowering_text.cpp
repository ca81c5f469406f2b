// Passes and messages of stages as text, one line an action.
#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/plan/lowering.h"

namespace trireme::plan {
namespace {

constexpr std::string_view kMessageLetters = "FBHPT";
static_assert(kMessageLetters.size() == kNames<Message>.size());

}  // namespace

char letter_of(Message message) {
  return kMessageLetters[static_cast<size_t>(message)];
}

std::string stage_text(const Action& action) {
  if (!action.is_message())
    return fmt::format("{} {}", action.kind, to_text({action.kind, action.stage, action.micro_batch}));
  std::string text =
      fmt::format("{} {}{}{}", action.kind, action.stage, letter_of(action.message), action.micro_batch);
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
