#pragma once
// An error kept for later: ranks that must go on together compare theirs before one of them throws.
#include <exception>
#include <functional>

namespace trireme {

/// The exception that `body` threw; null when it returned.
inline std::exception_ptr error_of(const std::function<void()>& body) {
  try {
    body();
    return {};
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace trireme
