#pragma once
// A trace of a few steps: written for chrome://tracing or Perfetto, and summed up by kind of kernel, or of
// operator where there is no GPU.
#include <cstdint>
#include <string>

#include "trireme/base/sink.h"

namespace trireme::train {

/// For people, one line.
std::string to_text(const KernelProfile& profile);

/// The kind of the GPU kernel `name`.
std::string kernel_group(const std::string& name);
/// The kind of the CPU operator or named range `name`; empty: it only calls others.
std::string operator_group(const std::string& name);

class Profiler {
 public:
  /// Profiles `steps` steps from step `first` on and writes the trace to `path`; with 0 steps it does
  /// nothing. `on_gpu`: kernels are traced and summed up; else operators of the CPU.
  Profiler(std::string path, int64_t first, int64_t steps, bool on_gpu);
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  void begin_step(int64_t step);
  /// After the last profiled step it waits for the device and writes; it returns whether it did.
  bool end_step(int64_t step);
  const KernelProfile& result() const { return result_; }

 private:
  void write();

  std::string path_;
  int64_t first_, steps_;
  bool on_gpu_;
  bool running_ = false;
  KernelProfile result_;
};

}  // namespace trireme::train
