#pragma once
// A dispatcher on a thread of its own.
#include <exception>
#include <thread>

#include "trireme/controller/dispatcher.h"

namespace trireme::cli {

/// Works to the end of this object at the latest.
class Serving {
 public:
  explicit Serving(controller::Dispatcher& dispatcher);
  ~Serving() { end(); }
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;

  /// Stops it; returns what it threw, if it did.
  std::exception_ptr end();

 private:
  controller::Dispatcher& dispatcher_;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace trireme::cli
