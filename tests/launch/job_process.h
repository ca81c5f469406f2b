#pragma once
// A job run by run_local() in a process of its own, so that tests can send it signals, kill it and read its
// output.
#include <sys/types.h>

#include <string>
#include <vector>

#include "trireme/base/descriptor.h"
#include "trireme/launch/local.h"

namespace trireme::launch {

/// A fresh folder, removed at the end of the scope.
class TempDir {
 public:
  TempDir();
  ~TempDir();
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// `ranks` copies of the test child that take `steps` (see test_child.cpp) in an otherwise empty environment.
/// With TRIREME_TEST_FORKS in the test's own environment, ranks are forks of one process that has loaded it.
LocalJob child_job(int64_t ranks, std::vector<std::string> steps);

struct Outcome {
  int code = 0;  ///< as a shell counts it
  std::string out, err;
  double seconds = 0.0;
};

/// Starts on construction. At its end a job that still runs is killed.
class JobProcess {
 public:
  /// out_fd, err_fd: where the launcher's stdout and stderr go; -1: into files, for Outcome.
  explicit JobProcess(const LocalJob& job, int out_fd = -1, int err_fd = -1);
  ~JobProcess();

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  /// Throws std::runtime_error when the job still runs after 20 s.
  Outcome wait();

 private:
  TempDir dir_;
  pid_t pid_;
  double started_;
};

/// JobProcess(job).wait().
Outcome run(const LocalJob& job);

/// Waits until the file exists and returns the process id in it. Throws std::runtime_error after 10 s.
pid_t wait_for_pid_file(const std::string& path);

/// Whether the process has ended, or does within `seconds`. A zombie counts as ended.
bool ends_within(pid_t pid, double seconds);

/// Reads a pipe of make_pipe() until all its writers have closed it; how many bytes came.
size_t bytes_until_end(const Descriptor& pipe);

std::vector<std::string> lines_of(const std::string& text);

}  // namespace trireme::launch
