#include "trireme/cli/child.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>

#include "trireme/base/clock.h"
#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/program_path.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

/// Strings as the null-terminated array of pointers that exec and spawn want.
class CStrings {
 public:
  explicit CStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
    for (std::string& text : strings_) pointers_.push_back(text.data());
    pointers_.push_back(nullptr);
  }
  CStrings(const CStrings&) = delete;
  CStrings& operator=(const CStrings&) = delete;
  char** data() { return pointers_.data(); }

 private:
  std::vector<std::string> strings_;
  std::vector<char*> pointers_;
};

std::vector<std::string> as_strings(const Environment& environment) {
  std::vector<std::string> strings;
  for (const auto& [name, value] : environment.variables()) strings.push_back(name + "=" + value);
  return strings;
}

[[noreturn]] void cannot_start(const std::string& program, int error) {
  const char* fix =
      error == E2BIG ? "shorten the prompt or the environment" : "check that it is an executable file";
  throw EnvironmentError("[cli.child] cannot start {}: {}; {}", program, errno_text(error), fix);
}

/// A pipe whose ends do not leak into other children.
struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw EnvironmentError("[cli.child] cannot create a pipe: {}; raise the open-file limit (ulimit -n)",
                             errno_text(errno));
    }
    read = Descriptor(ends[0]);
    write = Descriptor(ends[1]);
  }

  Descriptor read, write;
};

pid_t spawn(const std::string& program, const std::vector<std::string>& args, const Environment& environment,
            const Pipe& out, const Pipe& err) {
  std::vector<std::string> words = {program};
  words.insert(words.end(), args.begin(), args.end());
  CStrings argv(std::move(words));
  CStrings envp(as_strings(environment));
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, out.write.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.write.get(), STDERR_FILENO);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, program.c_str(), &actions, nullptr, argv.data(), envp.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) cannot_start(program, error);
  return pid;
}

/// Appends what is there; false at the end of the stream.
bool read_some(int fd, std::string& text) {
  char buffer[4096];
  const ssize_t count = ::read(fd, buffer, sizeof buffer);
  if (count > 0) text.append(buffer, static_cast<size_t>(count));
  return count > 0 || (count < 0 && errno == EINTR);
}

/// Reads both streams until they end; false when the deadline came first.
bool read_both(int out_fd, int err_fd, double deadline, ChildOutput& output) {
  pollfd streams[] = {{out_fd, POLLIN, 0}, {err_fd, POLLIN, 0}};
  while (streams[0].fd >= 0 || streams[1].fd >= 0) {
    const double left = deadline - monotonic_seconds();
    if (left <= 0.0) return false;
    if (::poll(streams, 2, static_cast<int>(left * 1e3) + 1) < 0) continue;
    if (streams[0].revents != 0 && !read_some(out_fd, output.out)) streams[0].fd = -1;
    if (streams[1].revents != 0 && !read_some(err_fd, output.err)) streams[1].fd = -1;
  }
  return true;
}

int wait_for(pid_t pid) {
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

std::optional<std::string> find_worker() {
  const fs::path here = fs::path(own_path()).parent_path();
  for (const fs::path& place : {here, here.parent_path() / "libexec"}) {
    const std::string path = (place / "trireme-worker").string();
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  return std::nullopt;
}

std::string worker_path() {
  if (const auto path = find_worker()) return *path;
  throw EnvironmentError(
      "[cli.child] there is no trireme-worker beside 'trireme' or in ../libexec; build with torch "
      "(./trireme.sh does)");
}

std::string trainer_path(const Environment& environment) {
  return environment.get(kProgramVariable) ? *environment.get(kProgramVariable) : worker_path();
}

Environment worker_environment(Environment environment, const Request& request) {
  const auto variables = environment.variables();
  for (const auto& [name, value] : variables) {
    if (name.starts_with("TRIREME__")) environment.unset(name);
  }
  environment.set("TRIREME_REQUEST", to_json(request));
  return environment;
}

void exec_worker(const Environment& environment, const Request& request) {
  const std::string program = request.verb == "train" ? trainer_path(environment) : worker_path();
  CStrings argv({program, request.verb});
  CStrings envp(as_strings(worker_environment(environment, request)));
  ::execve(program.c_str(), argv.data(), envp.data());
  cannot_start(program, errno);
}

ChildOutput run_child(const std::string& program, const std::vector<std::string>& args,
                      const Environment& environment, double timeout_s) {
  Pipe out;
  Pipe err;
  const pid_t pid = spawn(program, args, environment, out, err);
  out.write.close();
  err.write.close();
  ChildOutput output;
  output.timed_out = !read_both(out.read.get(), err.read.get(), monotonic_seconds() + timeout_s, output);
  if (output.timed_out) ::kill(pid, SIGKILL);
  output.exit_code = wait_for(pid);
  return output;
}

}  // namespace trireme::cli
