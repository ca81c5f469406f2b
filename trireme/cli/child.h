#pragma once
// The worker as a program: where it is, becoming it, and listening to it.
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/cli/request.h"

namespace trireme::cli {

/// trireme-worker beside this binary, else in ../libexec; nothing when there is none.
std::optional<std::string> find_worker();

/// find_worker(); throws EnvironmentError when there is none.
std::string worker_path();

/// The program that ranks of a training run execute: the one that has asked for it (train_main()), else the
/// worker.
std::string trainer_path(const Environment& environment);

/// `environment` for workers: with the request, and without TRIREME__SECTION__KEY, which the request's config
/// already holds.
Environment worker_environment(Environment environment, const Request& request);

/// Replaces this process by the worker running `request.verb`. Throws EnvironmentError when it cannot be
/// started.
[[noreturn]] void exec_worker(const Environment& environment, const Request& request);

struct ChildOutput {
  int exit_code = 0;  ///< 128+N for signal N
  bool timed_out = false;
  std::string out;
  std::string err;
};

/// Runs a program to its end, or kills it after `timeout_s`. Throws EnvironmentError when it cannot be
/// started.
ChildOutput run_child(const std::string& program, const std::vector<std::string>& args,
                      const Environment& environment, double timeout_s);

}  // namespace trireme::cli
