#include "trireme/cli/train_attempts.h"
#include "trireme/cli/words.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/store.h"
#include "trireme/cli/child.h"
#include "trireme/cli/data_path.h"
#include "trireme/launch/crash_report.h"
#include "trireme/launch/exits.h"
#include "trireme/launch/restarts.h"

namespace trireme::cli {
namespace {

/// The progress of a run's checkpoints.
struct Saved {
  int64_t generation = 0;  ///< the last that has committed one; 0: none has
  int64_t step = 0;        ///< of the newest
  int64_t furthest = 0;    ///< of all
};

Saved saved_in(const report::RunDirectory& directory) {
  Saved saved;
  const std::string path = directory.file("checkpoints");
  if (!std::filesystem::is_directory(path)) return saved;
  for (const checkpoint::Listed& listed : checkpoint::list_checkpoints(checkpoint::Folder(path))) {
    if (!listed.commit) continue;
    saved.generation = std::max(saved.generation, listed.commit->generation);
    saved.step = listed.commit->step;  // the newest comes last
    saved.furthest = std::max(saved.furthest, listed.commit->step);
  }
  return saved;
}

std::string cause_of(const launch::JobEnd& end) {
  if (end.cause) return launch::cause_in_words(end);
  return end.code == 0 ? "" : fmt::format("ended with code {}{}", end.code, launch::meaning(end.code));
}

/// "attempt 2: rank 1 (pid 12) was killed by signal 9 (SIGKILL) after step 17".
std::string told(const report::Attempt& attempt, size_t number) {
  const std::string after = attempt.last_step ? fmt::format(" after step {}", *attempt.last_step) : "";
  return fmt::format("attempt {}: {}{}", number, attempt.cause.empty() ? "unknown" : attempt.cause, after);
}

/// The message of the last error that a rank has logged behind byte `begin` of its log; empty: there is none.
std::string logged_error(const std::string& log, size_t begin) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(log, error)) return {};
  constexpr std::string_view kMark = " error: ";
  constexpr size_t kTimeOfDay = 8;  // "12:34:56"
  std::string found;
  const std::string text = read_file(log);
  for (const std::string& line : split(std::string_view(text).substr(std::min(begin, text.size())), '\n')) {
    const std::string rest = line.substr(std::min(kTimeOfDay, line.size()));
    if (rest.starts_with(kMark)) found = rest.substr(kMark.size());
  }
  return found;
}

double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Whether the signal to stop ended ranks that did not answer signals yet, since they were loading.
bool was_cut_short(const launch::JobEnd& end) {
  const auto by_signal = [&](const launch::RankExit& exit) { return exit.end.signal == end.signal; };
  return end.signal != 0 && !end.cause && std::ranges::any_of(end.exits, by_signal);
}

class Attempts {
 public:
  Attempts(launch::LocalJob job, Request request, const Environment& environment,
           const report::RunDirectory& directory, const report::Continuation& next,
           const RestartOptions& options, const RunRanks& run_ranks)
      : run_ranks_(run_ranks),
        job_(std::move(job)),
        request_(std::move(request)),
        environment_(environment),
        directory_(directory),
        restarts_(options.most, options.first_delay_s),
        saved_(saved_in(directory)),
        manifest_(next.manifest),
        attempts_before_(next.attempt - 1),
        attempt_(next.attempt) {
    request_.attempt = attempt_;
  }

  int run();

 private:
  launch::JobEnd run_once();
  bool goes_again(const launch::JobEnd& end);
  void note_progress();
  void go_on();
  void keep_to_files();
  int code_of_stop(int signal) const;
  int stopped(int signal, const launch::JobEnd& end);
  void write(const char* problem, std::function<void()> write);
  bool refused(int code) const;
  std::string log_of(int64_t rank) const { return directory_.file(fmt::format("logs/rank-{}.log", rank)); }
  std::string error_of(const launch::JobEnd& end) const;
  void record(const report::AttemptEnd& end);
  void write_crash_report(const launch::JobEnd& end);
  void say_used_up() const;
  void say_attempts() const;

  const RunRanks& run_ranks_;
  launch::LocalJob job_;
  Request request_;
  const Environment& environment_;
  const report::RunDirectory& directory_;
  launch::Launcher launcher_;
  launch::Restarts restarts_;
  Saved saved_;
  const report::Manifest& manifest_;
  int64_t attempts_before_;                      ///< of earlier commands
  int64_t attempt_;                              ///< the one under way, from 1
  std::vector<size_t> logged_;                   ///< by rank: bytes of its log before this attempt
  std::deque<std::function<void()>> unwritten_;  ///< to the run directory, in order
};

int Attempts::run() {
  for (;;) {
    const launch::JobEnd end = run_once();
    directory_.check_there();  // no attempt can go on in a folder that has gone
    if (!goes_again(end)) {
      say_attempts();
      // The run is whole, and the manifest says so.
      return end.code == 0 && end.output_lost ? static_cast<int>(ExitCode::kEnvironment) : end.code;
    }
    if (end.signal != 0) return stopped(end.signal, end);
    const double delay = restarts_.take();
    log_warning("restart {} of {} in {:.3g} s: {}", restarts_.used(), restarts_.most(), delay,
                saved_.step > 0 ? fmt::format("continues after step {}", saved_.step) : "starts at step 1");
    if (const auto signal = launcher_.pause(delay)) return stopped(*signal, end);
    go_on();
  }
}

launch::JobEnd Attempts::run_once() {
  job_.environment = worker_environment(environment_, request_);
  logged_.clear();
  for (int64_t rank = 0; rank < job_.ranks; ++rank) {
    std::error_code absent;
    const auto size = std::filesystem::file_size(log_of(rank), absent);
    logged_.push_back(absent ? 0 : static_cast<size_t>(size));
  }
  try {
    launch::JobEnd end = run_ranks_(launcher_, job_, request_);
    if (was_cut_short(end)) end.code = code_of_stop(end.signal);
    record({.exit_code = end.code,
            .cause = cause_of(end),
            .error = error_of(end),
            .rank = end.cause ? std::optional(launch::first_to_fail(end)) : std::nullopt});
    if (launch::may_start_again(end) && !refused(end.code)) write_crash_report(end);
    return end;
  } catch (const Error& error) {
    record(
        {.exit_code = static_cast<int>(error.exit_code()), .cause = error.what(), .error = {}, .rank = {}});
    throw;
  }
}

/// The error that the failed rank logged; empty if a signal ended it.
std::string Attempts::error_of(const launch::JobEnd& end) const {
  if (!end.cause) return {};
  const int64_t rank = launch::first_to_fail(end);
  try {
    return logged_error(log_of(rank), logged_.at(static_cast<size_t>(rank)));
  } catch (const EnvironmentError&) {
    return {};
  }
}

/// Whether there is reason for another attempt, and one is left.
bool Attempts::goes_again(const launch::JobEnd& end) {
  if (restarts_.most() == 0 || !end.cause) return false;
  if (!launch::may_start_again(end)) {
    log_info("not restarted: exit code {}{} would recur", end.code, launch::meaning(end.code));
    return false;
  }
  note_progress();
  if (restarts_.left() || end.signal != 0) return true;
  say_used_up();
  return false;
}

void Attempts::note_progress() {
  const Saved before = std::exchange(saved_, saved_in(directory_));
  if (saved_.furthest > before.furthest) restarts_.note_progress();
  saved_.furthest = std::max(saved_.furthest, before.furthest);
  // The checkpoint named was for the first attempt. The run has saved a newer one since, or the one named is
  // the newest by now and has got its own name back.
  std::error_code error;
  if (saved_.generation > before.generation || !std::filesystem::exists(request_.resume_from, error))
    request_.resume_from.clear();
}

/// Ranks read the files that the config names. What has become of them since the command began is not for
/// this run.
void Attempts::keep_to_files() {
  plan::ResolvedConfig resolved =
      plan::load({.path = "", .text = request_.config, .overrides = {}}, Environment());
  bool changed = false;
  for (const plan::ConfigFile& file : plan::config_files()) {
    const auto kept = manifest_.files.find(file.kept_as);
    if (kept == manifest_.files.end()) continue;
    const auto copy = std::filesystem::absolute(directory_.file(file.kept_as)).lexically_normal();
    if (use_copy_of_changed(file, resolved.config, copy.string(), kept->second)) changed = true;
  }
  if (changed) request_.config = plan::to_yaml(resolved, true);
}

void Attempts::go_on() {
  keep_to_files();
  request_.resume = true;
  request_.attempt = 0;  // begun here, in its turn
  try {
    directory_.set_summary_aside(attempt_);
  } catch (const EnvironmentError& error) {
    log_warning("{}", error.what());
  }
  ++attempt_;
  write("the manifest could not record that the run continues",
        [this] { directory_.note_attempt(manifest_); });
}

/// A run that can go on was preempted, unless a user pressed Ctrl-C.
int Attempts::code_of_stop(int signal) const {
  const bool preempted = signal != SIGINT && saved_.step > 0;
  return preempted ? static_cast<int>(ExitCode::kPreempted) : 128 + signal;
}

int Attempts::stopped(int signal, const launch::JobEnd& end) {
  const int code = code_of_stop(signal);
  record({.exit_code = code,
          .cause = fmt::format("{}; stopped before it was restarted", cause_of(end)),
          .error = error_of(end),
          .rank = launch::first_to_fail(end)});
  return code;
}

/// A record that cannot be written, as on a full disk, is no reason to give a run up: it is written before
/// the next one, so that each attempt is recorded as it was.
void Attempts::write(const char* problem, std::function<void()> write) {
  unwritten_.push_back(std::move(write));
  try {
    for (; !unwritten_.empty(); unwritten_.pop_front()) unwritten_.front()();
  } catch (const EnvironmentError& error) {
    log_warning("{}: {}", problem, error.what());
  }
}

/// Whether ranks refused to go on with the run: they ended before they had taken up its checkpoint, since
/// that belongs to another config or is damaged, or another process writes to the run.
bool Attempts::refused(int code) const {
  const bool takes_up = request_.attempt > 1;  // another command's run
  if (!takes_up || std::ssize(directory_.attempts()) >= attempt_) return false;
  return code == static_cast<int>(ExitCode::kUsage) || code == static_cast<int>(ExitCode::kCorruptData) ||
         directory_.writer();
}

void Attempts::record(const report::AttemptEnd& end) {
  if (refused(end.exit_code)) return;
  write("the manifest could not record how the run ended", [this, end, number = attempt_] {
    directory_.begin_attempt(number, manifest_);
    directory_.finish(end);
  });
}

/// The last operations of the ranks are known to this process alone, and only now.
void Attempts::write_crash_report(const launch::JobEnd& end) {
  const auto last_step = directory_.last_step();
  const std::string path = directory_.file(fmt::format("crash-{}.txt", attempt_));
  const std::string text = fmt::format("attempt {} ended {}: {}", attempt_,
                                       last_step ? fmt::format("after step {}", *last_step) : "before a step",
                                       launch::crash_report(end, wall_seconds()));
  write("the crash report could not be written", [path, text] {
    write_file_atomic(path, text);
    log_info("crash   what each rank was doing last is in {}", report::as_typed(path));
  });
}

void Attempts::say_used_up() const {
  const std::vector<report::Attempt> all = directory_.attempts();
  const auto first = all.size() - std::min(all.size(), static_cast<size_t>(restarts_.most() + 1));
  std::vector<std::string> causes;
  for (size_t i = first; i < all.size(); ++i) causes.push_back(told(all[i], i + 1));
  log_error(
      "[cli.train] not restarted: --max-restarts {} is used up without a new checkpoint. {}. Once the cause "
      "is fixed, continue with '{}'",
      restarts_.most(), join(causes, "; "),
      report::resume_command(report::as_typed(directory_.path()), request_.ranks));
}

/// Logs the restarts of a run, if there were any.
void Attempts::say_attempts() const {
  const std::vector<report::Attempt> all = directory_.attempts();
  if (std::ssize(all) < attempts_before_ + 2) return;
  std::vector<std::string> failures;
  int64_t lost = 0;
  const auto first = static_cast<size_t>(attempts_before_);
  for (size_t i = first; i < all.size(); ++i) {
    if (i > first) lost += all[i].steps_lost.value_or(0);
    if (i + 1 < all.size()) failures.push_back(told(all[i], i + 1));
  }
  log_info("run     restarted {}, {} repeated: {}", counted(static_cast<int64_t>(failures.size()), "time"),
           counted(lost, "step"), join(failures, "; "));
}

}  // namespace

int run_attempts(launch::LocalJob job, Request request, const Environment& environment,
                 const report::RunDirectory& directory, const report::Continuation& next,
                 const RestartOptions& options, const RunRanks& run_ranks) {
  return Attempts(std::move(job), std::move(request), environment, directory, next, options, run_ranks).run();
}

}  // namespace trireme::cli
