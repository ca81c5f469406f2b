#include "trireme/comm/bounded_call.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <utility>

namespace trireme::comm {
namespace {

/// A process that was stopped for a while counts at most one of these as its own waiting.
constexpr double kAskEvery_s = 0.1;

}  // namespace

std::string call_bounded(std::function<void()> body, double timeout_s,
                         const std::function<std::string()>& lost) {
  auto task = std::make_shared<std::packaged_task<void()>>(std::move(body));
  std::future<void> done = task->get_future();
  std::thread thread([task = std::move(task)] { (*task)(); });
  std::string reason;
  for (double waited = 0.0; waited < timeout_s && reason.empty(); waited += kAskEvery_s) {
    const auto slice = std::chrono::duration<double>(std::min(timeout_s - waited, kAskEvery_s));
    if (done.wait_for(slice) == std::future_status::ready) {
      thread.join();
      done.get();
      return {};
    }
    reason = lost();
  }
  thread.detach();
  return reason.empty() ? "passed its deadline" : "lost a peer: " + reason;
}

}  // namespace trireme::comm
