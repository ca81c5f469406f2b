#pragma once
// Calls of functions that a program of one's own has brought into a run.
#include <fmt/format.h>

#include <utility>

#include "trireme/base/log.h"

namespace trireme::train {

/// Result of `function`, one of the program's. Where it throws, a line of the log says in what, since its
/// message need not; the exception goes on as it is, so that its exit code holds.
template <typename Function, typename... Args>
auto call_of_program(const Function& function, fmt::format_string<Args...> in_what, Args&&... args) {
  try {
    return function();
  } catch (...) {
    log_error("[train.program] {} of the program has thrown:",
              fmt::format(in_what, std::forward<Args>(args)...));
    throw;
  }
}

}  // namespace trireme::train
