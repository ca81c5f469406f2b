#pragma once
// The life of a rank's process, whatever it does.
#include <functional>

namespace trireme::cli {

/// Runs `body`, says why it failed if it did, and ends this process with its exit code.
[[noreturn]] void run_worker(const std::function<int()>& body);

}  // namespace trireme::cli
