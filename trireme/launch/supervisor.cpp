#include "trireme/launch/supervisor.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/host.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"

namespace trireme::launch {
namespace {

constexpr double kSettle =
    0.5;  ///< after a rank has lost a peer: the end of that peer may be seen a little later
constexpr double kQuiet = 2.0;  ///< after a failure: ranks report it and end by themselves before SIGTERM
constexpr double kSameRequest = 1.0;  ///< signals within so many seconds are one request to stop
constexpr double kPollWithoutPidfd = 0.02;
constexpr double kBeatsEvery = 0.5;  ///< between two looks for signs of life
constexpr double kLookEvery = 0.1;   ///< between two looks at the clock while a limit runs

Descriptor& pipe_of(Rank& rank, Stream stream) {
  return stream == Stream::kOut ? rank.out : rank.err;
}

/// No descriptor tells when it is to be collected.
bool must_be_asked(const Rank& rank) {
  return rank.child.running() && (rank.ended || rank.child.wait_fd() < 0);
}

/// A number that grows as the rank gets on. Before it can count anything it loads its libraries, which takes
/// long where many ranks share a core.
uint64_t sign_of_life(const Rank& rank, uint64_t beats) {
  return beats > 0 ? beats : static_cast<uint64_t>(1e6 * processor_seconds(rank.child.pid()));
}

double quiet_seconds(double grace_s) {
  return std::min(kQuiet, grace_s / 2);
}

}  // namespace

JobEnd Supervisor::run() {
  running_ = static_cast<int64_t>(ranks_.size());
  while (running_ > 0) {
    look_for_starved(monotonic_seconds());
    wait_for_events();
    collect_without_pidfds();
    look_for_hung();
    look_for_limit();
    judge_failures();
    tee_.hold(!failures_.empty());
    advance_stop();
    tee_.tick(monotonic_seconds());
  }
  finish_output();
  return {.code = verdict(),
          .cause = cause_,
          .exits = exits_,
          .flights = {},
          .output_lost = tee_.out().lost(),
          .signal = forwarded_};
}

void Supervisor::wait_for_events() {
  PollSet poll;
  poll.watch(signals_.fd(), POLLIN, [this] { take_signals(); });
  if (tee_.out().pending()) poll.watch(tee_.out().fd(), POLLOUT, [this] { tee_.out().pump(); });
  if (tee_.err().pending()) poll.watch(tee_.err().fd(), POLLOUT, [this] { tee_.err().pump(); });
  for (Rank& rank : ranks_) {
    if (!rank.child.running()) continue;
    watch_output(poll, rank);
    if (!rank.ended) poll.watch(rank.child.wait_fd(), POLLIN, [this, &rank] { collect(rank); });
  }
  const double patience = seconds_to_next_deadline();
  time_.wait_for(patience);
  poll.wait(patience);
}

void Supervisor::watch_output(PollSet& poll, Rank& rank) {
  const bool out_is_free = rank.rank == 0 ? !tee_.out().choked() : !tee_.err().choked();
  // Where both have something to read, what was announced comes before results.
  if (!tee_.err().choked())
    poll.watch(rank.err.get(), POLLIN, [this, &rank] { take_output(rank, Stream::kErr); });
  if (out_is_free) poll.watch(rank.out.get(), POLLIN, [this, &rank] { take_output(rank, Stream::kOut); });
}

double Supervisor::seconds_to_next_deadline() const {
  const double now = monotonic_seconds();
  double wait = next_look_ - now;
  const auto consider = [&](double seconds) { wait = std::min(seconds, wait); };
  if (const auto due = tee_.next_due()) consider(*due - now);
  const bool gives_time = !failures_.empty() || ((stop_began_ || forwarded_at_) && !killed_stubborn_);
  if (gives_time) consider(kLookEvery);
  if (watches_for_hung()) consider(kBeatsEvery);
  if (job_.limit_s > 0.0) consider(kLookEvery);
  if (std::ranges::any_of(ranks_, must_be_asked)) consider(kPollWithoutPidfd);
  return wait;
}

/// Reads once: the rest is read in the next round, so that a rank that writes much does not hold up the
/// others.
void Supervisor::take_output(Rank& rank, Stream stream) {
  std::array<char, 1 << 16> buffer;
  Descriptor& pipe = pipe_of(rank, stream);
  const ssize_t count = ::read(pipe.get(), buffer.data(), buffer.size());
  const double now = monotonic_seconds();
  if (count > 0) tee_.feed(rank.rank, stream, {buffer.data(), static_cast<size_t>(count)}, now);
  if (count == 0) {
    tee_.end(rank.rank, stream, now);
    pipe.close();
  }
  const bool nobody_reads = rank.rank == 0 && stream == Stream::kOut && tee_.out().hung_up();
  if (nobody_reads) pipe.close();  // the rank gets SIGPIPE, as if it wrote to our stdout itself
}

/// Reads what an ended rank has left in its pipe. It does not wait for the end of the stream: a daemon that
/// the rank started may hold the pipe open for ever.
void Supervisor::drain(Rank& rank, Stream stream) {
  Descriptor& pipe = pipe_of(rank, stream);
  if (!pipe) return;
  std::array<char, 1 << 16> buffer;
  constexpr int kMostReads = 64;  // a pipe holds 64 KiB, enlarged ones a few MiB
  for (int i = 0; i < kMostReads; ++i) {
    const ssize_t count = ::read(pipe.get(), buffer.data(), buffer.size());
    if (count <= 0) break;
    tee_.feed(rank.rank, stream, {buffer.data(), static_cast<size_t>(count)}, monotonic_seconds());
  }
  tee_.end(rank.rank, stream, monotonic_seconds());
  pipe.close();
}

void Supervisor::collect(Rank& rank) {
  if (!rank.child.running() || lingers(rank)) return;
  const ProcessEnd end = rank.child.reap();
  drain(rank, Stream::kOut);
  drain(rank, Stream::kErr);
  --running_;
  const bool starved =
      end.signal == SIGKILL && !rank.asked && rank.hung_s == 0.0 && starved_so_far() > starved_before_;
  exits_.push_back({.rank = rank.rank,
                    .pid = rank.child.pid(),
                    .end = end,
                    .asked = rank.asked,
                    .starved = starved,
                    .stuck = rank.stuck,
                    .hung_s = rank.hung_s,
                    .at = time_.seconds()});
  const RankExit& exit = exits_.back();
  const bool heeded = forwarded_ != 0 && stopped_in_order(exit);
  if (exit_code(exit) != 0 && !exit.asked && !heeded) failures_.push_back(exit);
}

/// A rank that was told to stop may be a shell, which the signal ends at once: what it has started finishes
/// what it began, too.
bool Supervisor::lingers(Rank& rank) const {
  const bool told = forwarded_ != 0 || rank.asked, killed = killed_by_ != 0 || killed_stubborn_;
  if (!told || killed || !rank.child.group_goes_on()) return false;
  const bool has_been_told = std::exchange(rank.ended, true) || (forwarded_ == SIGINT && !rank.asked);
  if (!has_been_told) rank.child.signal_group(SIGTERM);
  return true;
}

void Supervisor::collect_without_pidfds() {
  for (Rank& rank : ranks_) {
    if (must_be_asked(rank) && rank.child.has_ended()) collect(rank);
  }
}

void Supervisor::take_signals() {
  while (const auto number = signals_.next()) {
    if (*number == SIGUSR1 && !job_.usr1_stops) {
      for (const Rank& rank : ranks_) rank.child.signal(*number);
    } else if (forwarded_ == 0) {
      forward(*number);
    } else if (killed_by_ == 0 && monotonic_seconds() - signalled_at_ >= kSameRequest) {
      killed_by_ = *number;
      kill_all();
    }
  }
}

void Supervisor::forward(int number) {
  forwarded_ = number;
  forwarded_at_ = time_.seconds();
  signalled_at_ = monotonic_seconds();
  for (const Rank& rank : ranks_) {
    // A terminal sends SIGINT to whole process groups, kill(1) sends SIGTERM to one process.
    number == SIGINT ? rank.child.signal_group(number) : rank.child.signal(number);
  }
  if (job_.stop_notice.empty()) return;
  tee_.settle();
  log_info("{}", job_.stop_notice);
}

void Supervisor::kill_all() {
  for (Rank& rank : ranks_) {
    rank.asked = true;
    rank.child.signal_group(SIGKILL);
  }
}

void Supervisor::judge_failures() {
  if (failures_.empty()) return;
  if (stop_began_ || killed_by_ != 0) return failures_.clear();
  const RankExit worst = culprit(failures_);
  const bool settled = running_ == 0 || time_.seconds() >= failures_.front().at + kSettle;
  const bool explained = job_.explains_failures && (worst.starved || explains_itself(worst));
  if ((lost_a_peer(worst) || explained) && !settled) return;
  failures_.clear();
  if (explained) tee_.show_only(ranks_that_explain());
  if (lost_a_peer(worst) && heeded_signal())
    return;  // its peers obeyed the signal a moment before it, and it lost them
  report(worst);
}

/// How many processes of this host the kernel has killed for want of memory since it started.
int64_t Supervisor::starved_so_far() const {
  std::ifstream counters(job_.kernel_counters);
  std::string name;
  for (int64_t count = 0; counters >> name >> count;) {
    if (name == "oom_kill") return count;
  }
  return 0;
}

/// Keeps the count of the look before the last: a process with much memory takes a while to die, and what the
/// kernel killed long before a rank says nothing about that one.
void Supervisor::look_for_starved(double now) {
  if (now < next_look_) return;
  starved_before_ = std::exchange(starved_lately_, starved_so_far());
  next_look_ = now + job_.starved_s;
}

/// Whoever waits for another rank gives up earlier, by a deadline of its own, and says for whom it waited:
/// this is for ranks that nobody waits for.
void Supervisor::look_for_hung() {
  if (!watches_for_hung() || stop_began_ || killed_by_ != 0 || killed_stubborn_) return;
  const double now = time_.seconds(), passed = now - beats_read_.value_or(now);
  beats_read_ = now;
  const std::vector<uint64_t> beats = flights_->all_beats();
  std::vector<std::string> hung;
  for (Rank& rank : ranks_) {
    if (!rank.child.running() || rank.ended || rank.hung_s > 0.0) continue;
    const uint64_t heard = sign_of_life(rank, beats[static_cast<size_t>(rank.rank)]);
    rank.silent_s = std::exchange(rank.beats, heard) == heard ? rank.silent_s + passed : 0.0;
    if (rank.silent_s < job_.silence_s) continue;
    rank.hung_s = rank.silent_s;
    rank.stuck = rank.child.kernel_state();
    rank.child.signal_group(SIGKILL);
    hung.push_back(std::to_string(rank.rank));
  }
  if (hung.size() < 2) return;  // report() names it
  tee_.settle();
  log_warning("[launch] ranks {} gave no sign of life for {:.0f} s and are killed", join(hung, ", "),
              job_.silence_s);
}

void Supervisor::look_for_limit() {
  const bool is_over = job_.limit_s > 0.0 && time_.seconds() >= job_.limit_s;
  if (!is_over || running_ == 0 || killed_by_ != 0) return;
  killed_by_ = SIGALRM;
  kill_all();
  tee_.settle();
  log_warning("[launch] the job still ran after its limit of {:g} s and is killed", job_.limit_s);
}

std::vector<int64_t> Supervisor::ranks_that_explain() const {
  std::vector<int64_t> ranks;
  for (const RankExit& exit : exits_) {
    if (explains_itself(exit)) ranks.push_back(exit.rank);
  }
  return ranks;
}

bool Supervisor::heeded_signal() const {
  const auto heeded = [](const RankExit& exit) { return !exit.asked && stopped_in_order(exit); };
  return forwarded_ != 0 && std::ranges::any_of(exits_, heeded);
}

void Supervisor::report(const RankExit& exit) {
  if (!heeded_signal()) cause_ = exit;
  stop_began_ = time_.seconds();
  tee_.settle();
  if (running_ == 0 && job_.explains_failures && explains_itself(exit)) return;  // nothing is left to add
  std::string others;
  if (running_ == 1) others = "; stopping the other rank";
  if (running_ > 1) others = fmt::format("; stopping the other {} ranks", running_);
  const std::string advice = exit.starved && job_.memory_advice ? ". " + job_.memory_advice() : hint(exit);
  log_error("[launch] {}{}{}", describe(exit, job_.explains_failures), others, advice);
}

void Supervisor::advance_stop() {
  if (running_ == 0) return;
  const double now = time_.seconds();
  const auto has_passed = [now](std::optional<double> since, double limit_s) {
    return since && now - *since >= limit_s;
  };
  if (!asked_to_stop_ && has_passed(stop_began_, quiet_seconds(job_.grace_s))) ask_to_stop();
  if (killed_stubborn_) return;
  if (has_passed(stop_began_, job_.grace_s)) {
    kill_stubborn(fmt::format("within {} s", job_.grace_s));
  } else if (has_passed(forwarded_at_, job_.stop_s)) {
    killed_by_ = forwarded_;
    kill_stubborn(fmt::format("within {} s of {}", job_.stop_s, signal_name(forwarded_)));
  }
}

void Supervisor::ask_to_stop() {
  asked_to_stop_ = true;
  for (Rank& rank : ranks_) {
    rank.asked = true;
    rank.child.signal(SIGTERM);
  }
}

void Supervisor::kill_stubborn(const std::string& when) {
  killed_stubborn_ = true;
  std::vector<std::string> names;
  for (Rank& rank : ranks_) {
    if (!rank.child.running()) continue;
    names.push_back(std::to_string(rank.rank));
    if (!rank.ended) rank.stuck = rank.child.kernel_state();
  }
  kill_all();
  tee_.settle();
  log_warning("[launch] {} {} did not stop {} and had to be killed", names.size() == 1 ? "rank" : "ranks",
              join(names, ", "), when);
}

/// Writes what is queued. A reader that is slow is waited for, until a signal or the limit after one.
void Supervisor::finish_output() {
  tee_.settle();
  bool impatient = killed_by_ != 0;
  while (!impatient && (tee_.out().pending() || tee_.err().pending())) {
    if (forwarded_at_ && time_.seconds() - *forwarded_at_ >= job_.stop_s) return;
    PollSet poll;
    poll.watch(signals_.fd(), POLLIN, [&] {
      const auto number = signals_.next();
      impatient = number.has_value();
      if (forwarded_ == 0) forwarded_ = number.value_or(0);
    });
    if (tee_.out().pending()) poll.watch(tee_.out().fd(), POLLOUT, [this] { tee_.out().pump(); });
    if (tee_.err().pending()) poll.watch(tee_.err().fd(), POLLOUT, [this] { tee_.err().pump(); });
    time_.wait_for(kLookEvery);
    poll.wait(kLookEvery);
  }
}

/// The exit code of the job: of the first failure, else of the signal that killed ranks, else of a rank that
/// obeyed a signal.
int Supervisor::verdict() const {
  if (cause_) return exit_code(*cause_);
  if (killed_by_ != 0) return 128 + killed_by_;
  const auto heeded = std::ranges::find_if(exits_, stopped_in_order);
  return heeded == exits_.end() ? 0 : exit_code(*heeded);
}

}  // namespace trireme::launch
