#include "trireme/launch/local.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "trireme/base/error.h"
#include "trireme/launch/cores.h"
#include "trireme/launch/fd.h"
#include "trireme/launch/listen.h"
#include "trireme/launch/rank_env.h"
#include "trireme/launch/signals.h"
#include "trireme/launch/supervisor.h"
#include "trireme/launch/tee.h"

namespace trireme::launch {
namespace {

void check(const LocalJob& job) {
  if (job.ranks < 1) throw ConfigError("[launch] {} ranks were asked for; start at least 1", job.ranks);
  if (!(job.grace_s >= 0 && job.stop_s >= 0)) {
    throw ConfigError("[launch] {} s of grace and {} s to stop are not possible; use 0 or more", job.grace_s,
                      job.stop_s);
  }
}

/// 128 random bits as 32 digits: the names of the job's entries in the store cannot be guessed.
std::string random_key() {
  std::random_device bits;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", bits(), bits(), bits(), bits());
}

/// The width of the terminal behind stderr; 0 when it is none.
int64_t terminal_columns() {
  constexpr int64_t kUsual = 80;
  if (::isatty(STDERR_FILENO) == 0) return 0;
  winsize size{};
  const bool known = ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUsual;
}

/// What all ranks of a job share. `null` is opened first, since it also fills descriptors 0 to 2.
struct Stage {
  explicit Stage(const LocalJob& of) : job(of) {}
  const LocalJob& job;
  const Fd null = open_null();
  SignalTrap signals;
  ListenSocket socket = listen_on_loopback();
  const std::string job_key = random_key();
  const int64_t threads = std::max<int64_t>(1, usable_cores() / job.ranks);
  const int64_t columns = terminal_columns();
};

RankPlace place_of(const Stage& stage, int64_t rank) {
  const bool first = rank == 0;
  return {.rank = rank,
          .ranks = stage.job.ranks,
          .port = stage.socket.port,
          .listen_fd = first ? stage.socket.fd.get() : -1,
          .threads = stage.threads,
          .job_key = stage.job_key,
          .tty_columns = first ? stage.columns : 0};
}

Rank start_rank(const Stage& stage, int64_t rank) {
  const LocalJob& job = stage.job;
  const RankPlace place = place_of(stage, rank);
  const bool inherits_stdout = rank == 0 && job.log_dir.empty();
  Pipe out = inherits_stdout ? Pipe{} : make_pipe();
  Pipe err = make_pipe();
  Child child({.program = job.program,
               .args = job.args,
               .environment = rank_environment(job.environment, place),
               .stdin_fd = stage.null.get(),
               .stdout_fd = out.write.get(),
               .stderr_fd = err.write.get(),
               .keep_fd = place.listen_fd,
               .signal_mask = stage.signals.child_mask()});
  return {.rank = rank, .child = std::move(child), .out = std::move(out.read), .err = std::move(err.read)};
}

}  // namespace

int run_local(const LocalJob& job) {
  check(job);
  Stage stage(job);
  Tee tee({.ranks = job.ranks, .log_dir = job.log_dir, .terminal = stage.columns > 0});
  Supervisor supervisor(tee, stage.signals, {.grace_s = job.grace_s, .stop_s = job.stop_s});
  for (int64_t rank = 0; rank < job.ranks; ++rank) {
    supervisor.add(start_rank(stage, rank));
    stage.socket.fd
        .close();  // rank 0 has inherited it; a copy here would keep the port open after rank 0 has ended
  }
  return supervisor.run();
}

}  // namespace trireme::launch
