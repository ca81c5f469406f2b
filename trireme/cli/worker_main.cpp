#include "trireme/cli/worker_main.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/streams.h"
#include "trireme/comm/agree.h"
#include "trireme/memory/host_memory.h"
#include "trireme/train/enough_memory.h"

namespace trireme::cli {
namespace {

/// An error that is none of ours.
int report_failure(const std::exception& error) {
  if (train::is_out_of_host_memory(error)) {
    log_error("[cli.worker] the host is out of memory; use a smaller model or fewer ranks on this machine");
    return static_cast<int>(ExitCode::kOutOfMemory);
  }
  const auto* const from_torch = dynamic_cast<const c10::Error*>(&error);
  log_error("{}", from_torch != nullptr ? from_torch->what_without_backtrace() : error.what());
  log_debug("{}", error.what());
  return static_cast<int>(ExitCode::kFailed);
}

/// The rank that knows the cause ends first, since the launcher names the first one that fails; the others
/// end while the launcher still waits for whoever fails with it.
constexpr auto kSpeakerFirst = std::chrono::milliseconds(200);

int answer_of(const std::function<int()>& body) {
  try {
    return body();
  } catch (const comm::FailedElsewhere& error) {
    log_debug("{}", error.what());
    std::this_thread::sleep_for(kSpeakerFirst);
    return static_cast<int>(error.exit_code());
  } catch (const Error& error) {
    log_error("{}", error.what());
    return static_cast<int>(error.exit_code());
  } catch (const c10::OutOfMemoryError& error) {
    log_error("[cli.worker] the device is out of memory: {}; use a smaller model or a shorter data.seq_len",
              error.what_without_backtrace());
    return static_cast<int>(ExitCode::kOutOfMemory);
  } catch (const std::exception& error) {
    if (std::ferror(stdout) != 0) return 0;  // a print threw: flush_results tells
    return report_failure(error);
  }
}

}  // namespace

void run_worker(const std::function<int()>& body) {
  hold_standard_streams();
  c10::initLogging();  // heeds TORCH_CPP_LOG_LEVEL, which `train` sets
  memory::keep_freed_memory();
  // All is written. Taking libtorch's registries apart takes a rank 0.1 s, and 64 ranks on two cores 10 s.
  ::_exit(flush_results(answer_of(body)));
}

}  // namespace trireme::cli
