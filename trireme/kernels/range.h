#pragma once
// Names for stretches of host work: Nsight shows them (NVTX), and so do the traces of `--profile`.
#include <ATen/record_function.h>

#include <string>

namespace trireme::kernels {

/// NVTX only; nothing in a build without CUDA.
void push_range(const char* name);
void pop_range();

/// A named range in a trace, from construction to destruction, on one thread; ranges of a thread nest.
class TraceRange {
 public:
  explicit TraceRange(const std::string& name) : record_(at::RecordScope::USER_SCOPE) {
    push_range(name.c_str());
    if (record_.isActive()) record_.before(name);
  }
  ~TraceRange() { pop_range(); }
  TraceRange(const TraceRange&) = delete;
  TraceRange& operator=(const TraceRange&) = delete;

 private:
  at::RecordFunction record_;
};

}  // namespace trireme::kernels
