#include "tests/launch/job_process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"

namespace trireme::launch {
namespace {

bool within(double seconds, const std::function<bool()>& holds) {
  const double deadline = monotonic_seconds() + seconds;
  while (!holds()) {
    if (monotonic_seconds() > deadline) return false;
    ::usleep(5'000);
  }
  return true;
}

void redirect(int to, int fd, const std::string& path) {
  if (fd < 0) fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  ::dup2(fd, to);
}

[[noreturn]] void be_launcher(const LocalJob& job) {
  int code = 99;
  try {
    code = run_local(job);
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = static_cast<int>(error.exit_code());
  }
  ::_exit(code);
}

/// The letter of the process's state in /proc, 'X' when it is gone.
char state_of(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  return name_end == std::string::npos ? 'X' : line.at(name_end + 2);
}

}  // namespace

TempDir::TempDir() {
  path_ = (std::filesystem::temp_directory_path() / "trireme-launch-XXXXXX").string();
  if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

LocalJob child_job(int64_t ranks, std::vector<std::string> steps) {
  LocalJob job;
  job.program = TEST_CHILD;
  job.args = std::move(steps);
  job.ranks = ranks;
  job.serves_forks = std::getenv("TRIREME_TEST_FORKS") != nullptr;
  return job;
}

JobProcess::JobProcess(const LocalJob& job, int out_fd, int err_fd) : started_(monotonic_seconds()) {
  pid_ = ::fork();
  if (pid_ != 0) return;
  redirect(STDOUT_FILENO, out_fd, dir_.file("out"));
  redirect(STDERR_FILENO, err_fd, dir_.file("err"));
  be_launcher(job);
}

JobProcess::~JobProcess() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void JobProcess::signal(int number) const {
  ::kill(pid_, number);
}

Outcome JobProcess::wait() {
  int status = 0;
  const bool ended = within(20.0, [&] { return ::waitpid(pid_, &status, WNOHANG) == pid_; });
  if (!ended) throw std::runtime_error("the job did not end within 20 s");
  pid_ = -1;
  const auto text_of = [&](const std::string& name) {
    return std::filesystem::exists(dir_.file(name)) ? read_file(dir_.file(name)) : std::string();
  };
  return {.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status),
          .out = text_of("out"),
          .err = text_of("err"),
          .seconds = monotonic_seconds() - started_};
}

Outcome run(const LocalJob& job) {
  return JobProcess(job).wait();
}

pid_t wait_for_pid_file(const std::string& path) {
  if (!within(10.0, [&] { return std::filesystem::exists(path); })) throw std::runtime_error("no " + path);
  return std::stoi(read_file(path));
}

bool ends_within(pid_t pid, double seconds) {
  return within(seconds, [&] {
    const char state = state_of(pid);
    return state == 'Z' || state == 'X';
  });
}

size_t bytes_until_end(const Descriptor& pipe) {
  ::fcntl(pipe.get(), F_SETFL, 0);
  size_t total = 0;
  char buffer[1 << 16];
  for (ssize_t count; (count = ::read(pipe.get(), buffer, sizeof buffer)) > 0;)
    total += static_cast<size_t>(count);
  return total;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines = split(text, '\n');
  if (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

}  // namespace trireme::launch
