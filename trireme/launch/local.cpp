#include "trireme/launch/local.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "trireme/base/clock.h"
#include "trireme/base/cores.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/launch/fork_server.h"
#include "trireme/launch/listen.h"
#include "trireme/launch/poll_set.h"
#include "trireme/launch/rank_env.h"
#include "trireme/launch/supervisor.h"
#include "trireme/launch/tee.h"

namespace trireme::launch {
namespace {

void check(const LocalJob& job) {
  if (job.ranks < 1) throw ConfigError("[launch] {} ranks requested; start at least 1", job.ranks);
  if (!(job.grace_s >= 0 && job.stop_s >= 0 && job.silence_s >= 0 && job.limit_s >= 0)) {
    throw ConfigError(
        "[launch] the grace time is {} s, the stop time {} s, the longest silence {} s and the limit {} s; "
        "all must be 0 or more",
        job.grace_s, job.stop_s, job.silence_s, job.limit_s);
  }
}

/// 128 random bits as 32 digits: the names of the job's entries in the store cannot be guessed.
std::string random_key() {
  std::random_device bits;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", bits(), bits(), bits(), bits());
}

/// Another descriptor of the terminal behind `fd`; closed when `fd` is none.
Descriptor terminal_of(int fd) {
  return ::isatty(fd) == 0 ? Descriptor() : Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

/// The ranks' flight records. Without them a crash report says less.
std::optional<FlightRecord> make_flights(int64_t ranks) {
  try {
    return FlightRecord::make(ranks);
  } catch (const EnvironmentError& error) {
    log_debug("{}", error.what());
    return std::nullopt;
  }
}

/// Things that all ranks of a job share.
struct Stage {
  Stage(const LocalJob& of, const Descriptor& nothing, const SignalTrap& trap)
      : job(of), null(nothing), signals(trap) {}
  const LocalJob& job;
  const Descriptor& null;
  const SignalTrap& signals;
  ListenSocket socket = listen_on_loopback();
  const std::string job_key = random_key();
  const int64_t threads = std::max<int64_t>(1, usable_cores() / job.ranks);
  const Descriptor err_terminal = terminal_of(STDERR_FILENO), out_terminal = terminal_of(STDOUT_FILENO);
  const std::optional<FlightRecord> flights = make_flights(job.ranks);
};

RankPlace place_of(const Stage& stage, int64_t rank) {
  const bool first = rank == 0;
  return {.rank = rank,
          .ranks = stage.job.ranks,
          .port = stage.socket.port,
          .listen_fd = first ? stage.socket.fd.get() : -1,
          .threads = stage.threads,
          .job_key = stage.job_key,
          .tty_fd = first ? stage.err_terminal.get() : -1,
          .out_tty_fd = first ? stage.out_terminal.get() : -1,
          .flight_fd = stage.flights ? stage.flights->descriptor() : -1};
}

/// The descriptors that a rank inherits; its environment names them.
std::vector<int> inherited(const RankPlace& place) {
  std::vector<int> fds = {place.listen_fd, place.tty_fd, place.out_tty_fd, place.flight_fd};
  std::erase(fds, -1);
  return fds;
}

/// None: each rank loads the program itself. Libraries read variables while they load, as rank 0's would.
std::optional<ForkServer> server_for(const Stage& stage) {
  const LocalJob& job = stage.job;
  if (!job.serves_forks || job.ranks == 1) return std::nullopt;
  RankPlace place = place_of(stage, 0);
  place.listen_fd = place.tty_fd = place.out_tty_fd = place.flight_fd = -1;
  return ForkServer({.program = job.program,
                     .args = job.args,
                     .environment = rank_environment(job.environment, place),
                     .stdin_fd = stage.null.get(),
                     .stdout_fd = stage.null.get(),
                     .stderr_fd = stage.null.get(),
                     .signal_mask = stage.signals.child_mask()});
}

Child start(const ChildSpec& spec, std::optional<ForkServer>& server, int interrupt_fd) {
  std::optional<Child> forked = server ? server->fork(spec, interrupt_fd) : std::nullopt;
  return forked ? std::move(*forked) : Child(spec);
}

Rank start_rank(const Stage& stage, int64_t rank, std::optional<ForkServer>& server) {
  const LocalJob& job = stage.job;
  const RankPlace place = place_of(stage, rank);
  const bool inherits_stdout = rank == 0 && job.log_dir.empty();
  Pipe out = inherits_stdout ? Pipe{} : make_pipe();
  Pipe err = make_pipe();
  Child child = start({.program = job.program,
                       .args = job.args,
                       .environment = rank_environment(job.environment, place),
                       .stdin_fd = stage.null.get(),
                       .stdout_fd = out.write.get(),
                       .stderr_fd = err.write.get(),
                       .keep_fds = inherited(place),
                       .signal_mask = stage.signals.child_mask()},
                      server, stage.signals.fd());
  return {.rank = rank, .child = std::move(child), .out = std::move(out.read), .err = std::move(err.read)};
}

}  // namespace

JobEnd Launcher::run(const LocalJob& job) {
  check(job);
  Stage stage(job, null_, signals_);
  Tee tee({.ranks = job.ranks, .log_dir = job.log_dir, .terminal = static_cast<bool>(stage.err_terminal)});
  Supervisor supervisor(tee, signals_, job, stage.flights ? &*stage.flights : nullptr);
  std::optional<ForkServer> server = server_for(stage);
  for (int64_t rank = 0; rank < job.ranks; ++rank) {
    supervisor.add(start_rank(stage, rank, server));
    stage.socket.fd
        .close();  // rank 0 has inherited it; a copy here would keep the port open after rank 0 has ended
  }
  server.reset();
  JobEnd end = supervisor.run();
  if (stage.flights) end.flights = stage.flights->read();
  return end;
}

std::optional<int> Launcher::pause(double seconds) {
  const double end = monotonic_seconds() + seconds;
  for (;;) {
    if (const auto number = signals_.next()) return number;
    const double left = end - monotonic_seconds();
    if (left <= 0) return std::nullopt;
    PollSet poll;
    poll.watch(signals_.fd(), POLLIN, [] {});
    poll.wait(left);
  }
}

int run_local(const LocalJob& job) {
  const JobEnd end = Launcher().run(job);
  return end.code == 0 && end.output_lost ? static_cast<int>(ExitCode::kEnvironment) : end.code;
}

}  // namespace trireme::launch
