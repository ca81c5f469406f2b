#include "trireme/launch/child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::launch {
namespace {

/// Everything the child needs after fork, made before it: between fork and exec only async-signal-safe calls
/// are legal.
struct ExecImage {
  explicit ExecImage(const ChildSpec& spec) {
    for (const auto& [name, value] : spec.environment.variables()) variables.push_back(name + "=" + value);
    argv.push_back(const_cast<char*>(spec.program.c_str()));
    for (const std::string& arg : spec.args) argv.push_back(const_cast<char*>(arg.c_str()));
    for (std::string& variable : variables) envp.push_back(variable.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
  }
  std::vector<std::string> variables;
  std::vector<char*> argv, envp;
};

void place_standard_fds(const ChildSpec& spec) {
  if (spec.stdin_fd >= 0) ::dup2(spec.stdin_fd, STDIN_FILENO);
  if (spec.stdout_fd >= 0) ::dup2(spec.stdout_fd, STDOUT_FILENO);
  if (spec.stderr_fd >= 0) ::dup2(spec.stderr_fd, STDERR_FILENO);
  for (const int fd : spec.keep_fds) ::fcntl(fd, F_SETFD, 0);
}

void reset_signals(const ChildSpec& spec) {
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  ::sigaction(SIGINT, &standard, nullptr);
  ::sigaction(SIGTERM, &standard, nullptr);
  ::pthread_sigmask(SIG_SETMASK, &spec.signal_mask, nullptr);
}

/// The child's side of fork: becomes the program, or writes errno to `report_fd`.
[[noreturn]] void become(const ChildSpec& spec, const ExecImage& image, pid_t parent, int report_fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // the parent died before the line above
  ::setpgid(0, 0);
  place_standard_fds(spec);
  reset_signals(spec);
  ::execve(spec.program.c_str(), image.argv.data(), image.envp.data());
  const int error = errno;
  [[maybe_unused]] const ssize_t written = ::write(report_fd, &error, sizeof error);
  ::_exit(127);
}

/// 0 once exec has closed the pipe, else the errno that the child reported.
int exec_result(int report_fd) {
  int error = 0;
  ::fcntl(report_fd, F_SETFL, 0);
  ssize_t count;
  do {
    count = ::read(report_fd, &error, sizeof error);
  } while (count < 0 && errno == EINTR);
  return count == sizeof error ? error : 0;
}

/// A process in /proc; '?' and no group where /proc does not have it.
struct Stat {
  char state = '?';
  pid_t parent = 0;
  pid_t group = 0;
};

Stat stat_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string line;
  std::getline(file, line);
  Stat stat;
  const size_t name_end = line.rfind(')');  // a name may hold anything
  if (name_end != std::string::npos)
    std::istringstream(line.substr(name_end + 1)) >> stat.state >> stat.parent >> stat.group;
  return stat;
}

Descriptor open_pidfd(pid_t pid) {
  return Descriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace

Child::Child(const ChildSpec& spec) {
  const ExecImage image(spec);
  Pipe report = make_pipe();
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ == 0) become(spec, image, parent, report.write.get());
  if (pid_ < 0) {
    throw EnvironmentError(
        "[launch] cannot start a process: {}; raise the process limit (ulimit -u) or start fewer ranks",
        errno_text(errno));
  }
  running_ = true;
  report.write.close();
  if (const int error = exec_result(report.read.get()); error != 0) {
    reap();
    throw EnvironmentError("[launch] cannot run {}: {}; check that it exists and is executable", spec.program,
                           errno_text(error));
  }
  pidfd_ = open_pidfd(pid_);
}

Child::Child(pid_t pid) : pid_(pid), pidfd_(open_pidfd(pid)), running_(true) {}

Child::Child(Child&& other) noexcept
    : pid_(other.pid_), pidfd_(std::move(other.pidfd_)), running_(std::exchange(other.running_, false)) {}

Child::~Child() {
  if (!running_) return;
  signal_group(SIGKILL);
  reap();
}

bool Child::has_ended() const {
  siginfo_t info{};
  return ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
         info.si_pid == pid_;
}

char Child::kernel_state() const {
  return stat_of(std::to_string(pid_)).state;
}

bool Child::group_goes_on() const {
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const std::string pid = entry.path().filename();
    if (pid.find_first_not_of("0123456789") != std::string::npos || pid == std::to_string(pid_)) continue;
    const Stat stat = stat_of(pid);
    if (stat.group == pid_ && stat.state != 'Z' && stat.state != 'X') return true;
  }
  return false;
}

void Child::signal(int number) const noexcept {
  if (running_) ::kill(pid_, number);
}

void Child::signal_group(int number) const noexcept {
  if (running_) ::kill(-pid_, number);
}

ProcessEnd Child::reap() noexcept {
  siginfo_t info{};
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) != 0 && errno == EINTR) {
  }
  signal_group(SIGKILL);  // before the pid is reaped, since then another process may get the group's number
  while (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED) != 0 && errno == EINTR) {
  }
  running_ = false;
  if (info.si_code == CLD_EXITED) return {.code = info.si_status};
  return {.signal = info.si_status};
}

}  // namespace trireme::launch
