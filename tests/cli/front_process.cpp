#include "tests/cli/front_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <stdexcept>
#include <thread>

#include "trireme/base/clock.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOut = ".stdout";
constexpr const char* kErr = ".stderr";

void redirect(const std::string& path, int flags, int target) {
  const int fd = ::open(path.c_str(), flags, 0644);
  ::dup2(fd, target);
  ::close(fd);
}

std::vector<char*> pointers_to(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

FrontProcess::FrontProcess() : environment_{{"PATH", "/usr/bin:/bin"}, {"HOME", folder_.path()}} {
  make_directories(folder_.file("bin"));
  std::error_code error;
  fs::create_hard_link(TRIREME_FRONT, folder_.file("bin/trireme"), error);
  if (error) fs::copy_file(TRIREME_FRONT, folder_.file("bin/trireme"));  // another file system
}

FrontProcess::Running FrontProcess::start(const Words& args) const {
  std::vector<std::string> words = {instead_.empty() ? folder_.file("bin/trireme") : instead_};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<std::string> variables;
  for (const auto& [name, value] : environment_) variables.push_back(name + "=" + value);
  const std::vector<char*> argv = pointers_to(words);
  const std::vector<char*> envp = pointers_to(variables);
  const std::string out = folder_.file(kOut);
  const std::string err = folder_.file(kErr);
  const pid_t child = ::fork();
  if (child == 0) {
    redirect("/dev/null", O_RDONLY, STDIN_FILENO);
    redirect(out, O_WRONLY | O_CREAT | O_TRUNC, STDOUT_FILENO);
    redirect(err, O_WRONLY | O_CREAT | O_TRUNC, STDERR_FILENO);
    const rlimit limit{static_cast<rlim_t>(memory_limit_), static_cast<rlim_t>(memory_limit_)};
    if (memory_limit_ > 0) ::setrlimit(RLIMIT_AS, &limit);
    if (::chdir(folder_.path().c_str()) == 0) ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  return {*this, child};
}

FrontProcess::Running::~Running() {
  if (over_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void FrontProcess::Running::signal(int number) const {
  ::kill(pid_, number);
}

Outcome FrontProcess::Running::wait(double seconds) {
  int status = 0;
  const double deadline = monotonic_seconds() + seconds;
  while (::waitpid(pid_, &status, WNOHANG) == 0) {
    if (monotonic_seconds() > deadline) {
      throw std::runtime_error(
          fmt::format("the command still runs after {} s:\n{}", seconds, read_file(front_.file(kErr))));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  over_ = true;
  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return {.code = code, .out = read_file(front_.file(kOut)), .err = read_file(front_.file(kErr))};
}

Outcome FrontProcess::run(const Words& args) const {
  constexpr double kPatience_s = 120.0;
  return start(args).wait(kPatience_s);
}

std::string FrontProcess::said() const {
  return fs::exists(folder_.file(kOut)) ? read_file(folder_.file(kOut)) : "";  // it has not begun
}

void FrontProcess::use_real_worker(const std::string& path) {
  fs::create_symlink(path, folder_.file("bin/trireme-worker"));
}

void FrontProcess::set_worker(const std::string& script) {
  const std::string path = folder_.file("bin/trireme-worker");
  fs::remove(path);  // a link to the real one
  const std::string serves_no_forks = "[ -z \"$TRIREME_FORK_SERVER_FD\" ] || exit 1\n";
  write_file_atomic(path, "#!/bin/sh\n" + serves_no_forks + script + "\n");
  fs::permissions(path, fs::perms::owner_all);
}

nlohmann::json FrontProcess::manifest() const {
  return read_json(file("runs/latest/manifest.json"));
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace trireme::cli
