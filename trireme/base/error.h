#pragma once
// Typed errors and the exit codes they map to. Every message reads
// "[module.op] what happened, the values seen, the fix".
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace trireme {

/// Process exit codes, stable and documented; 128+N means killed by signal N.
enum class ExitCode : int {
  kOk = 0,
  kFailed = 1,
  kUsage = 2,        ///< bad command line or config; nothing was started
  kEnvironment = 3,  ///< machine, disk or installation unusable
  kOutOfMemory = 4,
  kCommunication = 5,  ///< a peer or a deadline was lost
  kNumerics = 6,       ///< NaN or infinity
  kCorruptData = 7,    ///< data or checkpoint damaged or unusable
  kComparison = 8,     ///< a requested comparison did not hold
  kPreempted = 75,     ///< a signal but Ctrl-C honoured, state saved: run again
  kInterrupted = 130,  ///< Ctrl-C honoured, run directory complete
};

/// Whether `code` says that SIGINT, SIGTERM, SIGUSR1 or SIGHUP asked a process to stop: 128 + that number.
bool is_stop_code(int code);

/// Base of all errors that a user can meet.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode exit_code() const { return code_; }

 private:
  ExitCode code_;
};

/// One error type per exit code; constructed with an fmt format string.
template <ExitCode kCode>
class TypedError : public Error {
 public:
  template <typename... Args>
  explicit TypedError(fmt::format_string<Args...> format, Args&&... args)
      : Error(kCode, fmt::format(format, std::forward<Args>(args)...)) {}
};

using ConfigError = TypedError<ExitCode::kUsage>;
using EnvironmentError = TypedError<ExitCode::kEnvironment>;
using OutOfMemory = TypedError<ExitCode::kOutOfMemory>;
using CommError = TypedError<ExitCode::kCommunication>;
using NumericsError = TypedError<ExitCode::kNumerics>;
using DataError = TypedError<ExitCode::kCorruptData>;
/// A broken invariant: a bug in the calling program or in Trireme.
using LogicError = TypedError<ExitCode::kFailed>;

/// The text of errno value `error`, thread-safe.
std::string errno_text(int error);

}  // namespace trireme

/// Throws LogicError with the message when the condition is false. For invariants, not for user input.
#define TRIREME_CHECK(condition, ...)                                                                        \
  do {                                                                                                       \
    if (!(condition)) [[unlikely]] {                                                                         \
      throw ::trireme::LogicError("{} [{} failed at {}:{}]", fmt::format(__VA_ARGS__), #condition, __FILE__, \
                                  __LINE__);                                                                 \
    }                                                                                                        \
  } while (false)
