#include "trireme/cli/gpu_count.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <csignal>

namespace trireme::cli {
namespace {

/// Blocks all signals for a scope. Threads that start in it inherit that, so signals to the process keep
/// going to the threads that expect them: without it a Ctrl-C for the launcher strikes a thread of the driver
/// and ends the process.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

/// The driver's own interface (cuda.h), as far as it is asked.
class Driver {
 public:
  /// Loads it; it stays loaded, for it may have started threads that live in it.
  Driver() : library_(::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
    const auto init = find<int(unsigned)>("cuInit");
    if (init == nullptr || init(0) != kSuccess) library_ = nullptr;
  }

  int count() const {
    const auto get_count = find<int(int*)>("cuDeviceGetCount");
    int count = 0;
    return get_count != nullptr && get_count(&count) == kSuccess ? count : 0;
  }

  int64_t memory(int index) const {
    const auto get = find<int(int*, int)>("cuDeviceGet");
    const auto total = find<int(size_t*, int)>("cuDeviceTotalMem_v2");
    int device = 0;
    size_t bytes = 0;
    const bool known = get != nullptr && total != nullptr && get(&device, index) == kSuccess &&
                       total(&bytes, device) == kSuccess;
    return known ? static_cast<int64_t>(bytes) : 0;
  }

 private:
  static constexpr int kSuccess = 0;

  template <typename Function>
  Function* find(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<Function*>(::dlsym(library_, name));
  }

  void* library_;
};

}  // namespace

int gpu_count() {
  const SignalsBlocked blocked;
  return Driver().count();
}

int64_t gpu_memory() {
  const SignalsBlocked blocked;
  const Driver driver;
  int64_t least = 0;
  for (int i = 0; i < driver.count(); ++i) {
    const int64_t bytes = driver.memory(i);
    least = i == 0 ? bytes : std::min(least, bytes);
  }
  return least;
}

}  // namespace trireme::cli
