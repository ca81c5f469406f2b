#include "trireme/gt/capture.h"

#include "trireme/base/log.h"
#include "trireme/gt/captured_step.h"
#include "trireme/gt/program.h"

namespace gt {

struct Capture::State {
  std::weak_ptr<Program> program = {};
  trireme::plan::StepRecording recording = {};
  uint32_t number = 0;
  uint64_t defined = 0;  ///< the version that workers have; 0: none
  int64_t calls = 0, replays = 0;
  std::string why = {};
};

Capture::Capture() : state_(std::make_unique<State>()) {}
Capture::~Capture() = default;
Capture::Capture(Capture&&) noexcept = default;
Capture& Capture::operator=(Capture&&) noexcept = default;

void Capture::operator()(const std::function<void()>& step) {
  State& state = *state_;
  const std::shared_ptr<Program> program = Program::current();
  if (state.program.lock() != program) state = {.program = program, .number = program->next_step()};
  CapturedStep captured(state.recording, program->runner());
  program->capture(&captured);
  try {
    step();
    program->capture(nullptr);
  } catch (...) {
    program->stop_capture();
    captured.release();
    throw;
  }
  ++state.calls;
  const bool was_replay = state.replays > 0 && state.why.empty();
  if (captured.is_complete()) {
    if (std::exchange(state.defined, state.recording.version()) != state.recording.version())
      program->runner().define_step(state.number, state.recording.step());
    program->runner().replay(state.number, captured.arguments());
    ++state.replays;
    state.why.clear();
    return;
  }
  captured.release();
  program->flush();
  state.recording.observe(captured.made(), program->signal_names());
  state.why = state.recording.why();
  if (was_replay)
    trireme::log_info("[gt.capture] call {} goes to workers instruction by instruction: {}", state.calls,
                      state.why);
}

int64_t Capture::calls() const {
  return state_->calls;
}
int64_t Capture::replays() const {
  return state_->replays;
}
int64_t Capture::instructions() const {
  return std::ssize(state_->recording.step().instructions);
}
int64_t Capture::arguments() const {
  return std::ssize(state_->recording.step().is_real);
}
const std::string& Capture::why() const {
  return state_->why;
}

}  // namespace gt
