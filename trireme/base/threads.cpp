#include "trireme/base/threads.h"

#include <system_error>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme {
namespace {

constexpr const char* kFix =
    "raise the limit of processes (ulimit -u, or pids.max of the container) or of memory (ulimit -v)";

}  // namespace

void start_threads(int64_t wanted, int64_t least, const std::function<void()>& start_one) {
  for (int64_t started = 0; started < wanted; ++started) {
    try {
      start_one();
    } catch (const std::system_error& error) {
      if (started < least) {
        throw EnvironmentError("[base.threads] {} of {} threads could be started: {}; {}", started, wanted,
                               error.code().message(), kFix);
      }
      log_warning("[base.threads] {} of {} threads could be started, and the work goes on with these: {}; {}",
                  started, wanted, error.code().message(), kFix);
      return;
    }
  }
}

}  // namespace trireme
