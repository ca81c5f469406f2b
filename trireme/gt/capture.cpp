#include "trireme/gt/capture.h"

#include <fmt/format.h>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/gt/captured_step.h"
#include "trireme/gt/program.h"

namespace gt {
namespace {

constexpr size_t kMostKnown = 16;  // steps of a capture: as many shapes of batches, or kinds of steps
constexpr int64_t kSaysAfter = 8;  // calls, of which none was a replay

}  // namespace

struct Capture::State {
  State() = default;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State() { forget(); }

  /// Workers may give the numbers of its steps to others.
  void forget() {
    const std::shared_ptr<Program> before = program.lock();
    for (const KnownStep& step : known) {
      if (before) before->give_back_step(step.number);
    }
    known.clear();
  }
  void learn(const CapturedStep& captured);
  void replay(KnownStep& step, const std::vector<int64_t>& arguments);
  void say(bool was_replay);

  std::weak_ptr<Program> program = {};
  std::list<KnownStep> known = {};  ///< the one that was made last is the first
  int64_t calls = 0, replays = 0;
  std::string why = "it was not called yet";
};

/// Where it is a step that was made before, that one's numbers are known better; otherwise it is another one,
/// and the one that was not made for longest gives way.
void Capture::State::learn(const CapturedStep& captured) {
  const std::shared_ptr<Program> owner = program.lock();
  if (captured.is_too_long()) {
    why = fmt::format("it has more than {} instructions", CapturedStep::kMostInstructions);
    return;
  }
  why = "it was made for the first time";
  for (auto step = known.begin(); step != known.end(); ++step) {
    const std::string differs = step->recording.difference(captured.made(), owner->signal_names());
    if (step == known.begin() && !differs.empty())
      why = fmt::format("it is none of the {} steps that are known; of the last one it differs: {}",
                        known.size(), differs);
    if (!differs.empty()) continue;
    why = step->recording.observe(captured.made(), owner->signal_names());
    known.splice(known.begin(), known, step);
    return;
  }
  if (known.size() == kMostKnown) {
    owner->give_back_step(known.back().number);
    known.pop_back();
  }
  const std::optional<uint32_t> number = owner->next_step();
  if (!number) {
    why = "workers have as many steps of all captures as they keep";
    return;
  }
  known.push_front({trireme::plan::StepRecording(captured.made()), *number});
}

void Capture::State::replay(KnownStep& step, const std::vector<int64_t>& arguments) {
  trireme::controller::ProgramRunner& runner = program.lock()->runner();
  if (step.defined != step.recording.version()) runner.define_step(step.number, step.recording.step());
  step.defined = step.recording.version();
  runner.replay(step.number, arguments);
  known.splice(known.begin(), known,
               std::ranges::find_if(known, [&](const KnownStep& one) { return &one == &step; }));
  ++replays;
  why.clear();
}

void Capture::State::say(bool was_replay) {
  if (was_replay)
    trireme::log_info("[gt.capture] call {} goes to workers instruction by instruction: {}", calls, why);
  if (replays == 0 && calls == kSaysAfter)
    trireme::log_info("[gt.capture] {} calls were {} steps, and none was a replay; the last one: {}", calls,
                      known.size(), why);
}

Capture::Capture() : state_(std::make_unique<State>()) {}
Capture::~Capture() = default;
Capture::Capture(Capture&&) noexcept = default;
Capture& Capture::operator=(Capture&&) noexcept = default;

void Capture::operator()(const std::function<void()>& step) {
  State& state = *state_;
  const std::shared_ptr<Program> owner = Program::current();
  if (state.program.lock() != owner) {
    state.forget();
    state.program = owner;
  }
  CapturedStep captured(state.known, owner->runner());
  owner->capture(&captured);
  const bool was_replay = state.replays > 0 && state.why.empty();
  ++state.calls;
  try {
    step();
    owner->capture(nullptr);
  } catch (...) {
    owner->stop_capture();
    state.why = "the function has thrown an error";
    try {
      captured.release();
    } catch (const trireme::Error&) {
      // The session has failed, which the next call says; the function's own error tells more.
    }
    throw;
  }
  const auto [same, arguments] = captured.complete();
  if (same != nullptr) return state.replay(*same, arguments);
  captured.release();
  owner->flush();
  state.learn(captured);
  state.say(was_replay);
}

int64_t Capture::calls() const {
  return state_->calls;
}
int64_t Capture::replays() const {
  return state_->replays;
}
int64_t Capture::instructions() const {
  return state_->known.empty() ? 0 : std::ssize(state_->known.front().recording.step().instructions);
}
int64_t Capture::arguments() const {
  return state_->known.empty() ? 0 : std::ssize(state_->known.front().recording.step().is_real);
}
const std::string& Capture::why() const {
  return state_->why;
}

}  // namespace gt
