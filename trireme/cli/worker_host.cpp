#include "trireme/cli/worker_host.h"

#include <algorithm>
#include <csignal>
#include <fstream>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::cli {
namespace {

/// So many bytes of lines are in one answer, in which JSON may need six for one.
constexpr size_t kMostLines = 10 << 10;

/// The first of `lines`, of whole characters.
std::string first_lines(const std::string& lines) {
  size_t end = std::min(lines.size(), kMostLines);
  const auto is_within = [&](size_t at) { return (static_cast<unsigned char>(lines[at]) & 0xc0) == 0x80; };
  while (end > 0 && end < lines.size() && is_within(end)) --end;
  return lines.substr(0, end == 0 ? std::min(lines.size(), kMostLines) : end);
}

/// The highest use of memory by this process begins anew, so that a run reports its own.
void forget_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

}  // namespace

std::string WorkerHost::act(const std::string& text, const plan::WorldSpec& meeting) {
  const RunAction action = run_action_from_json(text);
  switch (action.kind) {
    case RunAction::Kind::kBuild:
      build(action.request, meeting);
      break;
    case RunAction::Kind::kStep:
      step(action);
      break;
    case RunAction::Kind::kFinish:
      finish();
      break;
  }
  return to_json(answer());
}

void WorkerHost::build(const Request& request, const plan::WorldSpec& meeting) {
  TRIREME_CHECK(!run_, "[cli.worker] a run is under way; finish it before the next is built");
  lines_.clear();
  forget_peak();
  const LinesOut lines = [this](const std::string& line) { lines_ += line; };
  run_.emplace(request, environment_, meeting, keeps_lines_ ? lines : LinesOut());
}

RankRun& WorkerHost::run() {
  TRIREME_CHECK(run_, "[cli.worker] there is no run; build one first");
  return *run_;
}

void WorkerHost::step(const RunAction& action) {
  if (action.steps == 0) return;
  if (action.stop_signal != 0) ask_to_stop(action.stop_signal);
  run().step(action.steps);
}

void WorkerHost::finish() {
  last_exit_code_ = run().finish();
  run_.reset();
  no_run_under_way();
}

RunAnswer WorkerHost::answer() {
  RunAnswer answer{
      .is_over = !run_ || run_->is_over(), .lines = first_lines(lines_), .exit_code = last_exit_code_};
  lines_.erase(0, answer.lines.size());
  answer.has_more = !lines_.empty();
  return answer;
}

void WorkerHost::end() {
  if (!run_) return;
  log_warning("[cli.worker] the client has gone: the run ends after one more step, with what it can save");
  ask_to_stop(SIGTERM);
  run_->step(1);
  finish();
}

}  // namespace trireme::cli
