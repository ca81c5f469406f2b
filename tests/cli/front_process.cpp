#include "tests/cli/front_process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

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

Outcome FrontProcess::run(const std::vector<std::string>& args) const {
  std::vector<std::string> words = {folder_.file("bin/trireme")};
  words.insert(words.end(), args.begin(), args.end());
  std::vector<std::string> variables;
  for (const auto& [name, value] : environment_) variables.push_back(name + "=" + value);
  const std::vector<char*> argv = pointers_to(words);
  const std::vector<char*> envp = pointers_to(variables);
  const std::string out = folder_.file(".stdout");
  const std::string err = folder_.file(".stderr");
  const pid_t child = ::fork();
  if (child == 0) {
    redirect("/dev/null", O_RDONLY, STDIN_FILENO);
    redirect(out, O_WRONLY | O_CREAT | O_TRUNC, STDOUT_FILENO);
    redirect(err, O_WRONLY | O_CREAT | O_TRUNC, STDERR_FILENO);
    if (::chdir(folder_.path().c_str()) == 0) ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return {.code = code, .out = read_file(out), .err = read_file(err)};
}

void FrontProcess::set_worker(const std::string& script) {
  const std::string path = folder_.file("bin/trireme-worker");
  write_file_atomic(path, "#!/bin/sh\n" + script + "\n");
  fs::permissions(path, fs::perms::owner_all);
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace trireme::cli
