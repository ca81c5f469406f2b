#pragma once
// The workers of this thread's program.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "trireme/base/env.h"
#include "trireme/controller/program_runner.h"

namespace gt {

/// How a program meets its workers. What it leaves as it is here follows from the document's variables:
/// TRIREME_CONFIG (or GT_CONFIG) names a file of signals, TRIREME_BACKEND (GT_BACKEND) the device, where
/// "numpy" is the CPU, TRIREME_AUTO_SHARD (GT_AUTO_SHARD) splits what no scope places,
/// TRIREME_INSTRUCTION_LOG (GT_INSTRUCTION_LOG) names a file for a line an instruction, TRIREME_PROGRAM_FILE
/// one for the program as 'trireme replay' runs it, TRIREME_VERBOSE (GT_VERBOSE) or
/// TRIREME_DEBUG_DISPATCHER (GT_DEBUG_DISPATCHER) shows what the server says, TRIREME_HOST is the server's
/// host, and TRIREME_TOKEN_FILE, or TRIREME_CERT_FILE, TRIREME_KEY_FILE and TRIREME_CA_FILE, name what other
/// hosts want to see.
struct Options {
  std::string signals = {};          ///< a file of signals (docs/guide/signals.md); empty: scopes need none
  std::string device = "auto";       ///< cpu, cuda, or auto: GPUs where there are some
  std::string instruction_log = {};  ///< empty: none
  std::string program_file = {};     ///< as 'trireme replay' reads it; empty: none
  bool is_explicit = false;          ///< what would move between workers unasked is an error
  bool auto_shard = false;           ///< outside of scopes tensors are split by rows over all workers
  bool verbose = false;
  double timeout_s = 300.0;  ///< of each wait
  std::string command = {};  ///< the trireme program; empty: TRIREME_COMMAND, beside this program, or in PATH
  std::string host = {};     ///< of the server that connect() joins by its port; empty: this one
  /// File of the token that a server on another host wants; empty: none, or a certificate.
  std::string token = {};
  /// PEM files: this program's certificate, its private key, and the authority that it trusts.
  std::string certificate = {}, key = {}, authority = {};

  /// With what variables say where these options say nothing; gpu_workers() and connect() do so themselves.
  /// Throws trireme::ConfigError for values that mean nothing.
  Options completed(const trireme::Environment& environment = trireme::Environment::process()) const;
  /// Options that say nothing, completed.
  static Options from_environment(const trireme::Environment& environment = trireme::Environment::process());
};

class Program;

/// As long as it lives, this thread's calls make the program of its workers; tensors end with it.
class [[nodiscard]] Workers {
 public:
  /// Throws trireme::ConfigError where the thread has workers, and as plan::load_signals() does.
  Workers(std::shared_ptr<trireme::controller::ProgramRunner> runner, const Options& options);
  Workers(Workers&& other) noexcept = default;
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  Workers& operator=(Workers&&) = delete;

  int64_t size() const { return runner_->workers(); }
  /// Gives workers what they were not given yet, but for what a schedule or a capture holds back; a fetch
  /// does so by itself.
  void flush();

 private:
  std::shared_ptr<trireme::controller::ProgramRunner> runner_;
  std::shared_ptr<Program> program_;
};

/// Starts a server and `count` workers on this machine, one a GPU, or on the CPU, and says so. They end with
/// what it returns. Throws trireme::EnvironmentError without the trireme program, CommError where workers do
/// not come.
Workers gpu_workers(int64_t count, const Options& options = {});
/// Joins a server that 'trireme serve' has started, at its port or its Unix socket. Workers stay for the next
/// client. A server beyond this host (Options::host) is joined by TLS alone; throws trireme::ConfigError
/// without a token or a certificate.
Workers connect(int64_t port, const Options& options = {});
Workers connect(const std::string& socket, const Options& options = {});

}  // namespace gt
