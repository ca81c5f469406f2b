#pragma once
// Names for stretches of host work: Nsight shows those of ranges (NVTX), and the traces of `--profile` all.
#include <ATen/record_function.h>

#include <string>

namespace trireme::kernels {

/// NVTX only, which a profiler listens to, on machines without a GPU as well; nothing in a build without its
/// header, which CUDA's toolkit and PyTorch's packages for GPUs bring.
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

/// An operator of ours in a trace, as those of torch are, from construction to destruction: without a GPU its
/// name says what the time went into (train/profile.h).
class OperatorRange {
 public:
  /// `name`: a literal, "trireme::matmul".
  explicit OperatorRange(const char* name) : record_(at::RecordScope::FUNCTION) {
    if (record_.isActive()) record_.before(name);
  }
  OperatorRange(const OperatorRange&) = delete;
  OperatorRange& operator=(const OperatorRange&) = delete;

 private:
  at::RecordFunction record_;
};

}  // namespace trireme::kernels
