#include "trireme/cli/gpu_count.h"

#include <dlfcn.h>
#include <pthread.h>

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

}  // namespace

int gpu_count() {
  const SignalsBlocked blocked;
  // The library stays loaded: the driver may have started threads that live in it.
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned)>(::dlsym(driver, "cuInit"));
  const auto get_count = reinterpret_cast<int (*)(int*)>(::dlsym(driver, "cuDeviceGetCount"));
  constexpr int kSuccess = 0;
  int count = 0;
  if (init == nullptr || get_count == nullptr || init(0) != kSuccess || get_count(&count) != kSuccess)
    return 0;
  return count;
}

}  // namespace trireme::cli
