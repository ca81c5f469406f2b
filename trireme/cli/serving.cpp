#include "trireme/cli/serving.h"

namespace trireme::cli {

Serving::Serving(controller::Dispatcher& dispatcher)
    : dispatcher_(dispatcher), thread_([this] {
        try {
          dispatcher_.run();
        } catch (...) {
          failure_ = std::current_exception();
        }
      }) {}

std::exception_ptr Serving::end() {
  if (!thread_.joinable()) return failure_;
  dispatcher_.stop();
  thread_.join();
  return failure_;
}

}  // namespace trireme::cli
