#pragma once
// A trace of a few steps: written for chrome://tracing or Perfetto, and summed up by kind of kernel.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace trireme::train {

/// Busy time of a GPU by kind of kernel. Kernels of different streams may run at once.
struct KernelGroup {
  std::string name;   ///< GEMM, attention, norm, ...
  double ms = 0.0;    ///< sum over the kernels, a step
  int64_t calls = 0;  ///< a step
};

struct KernelProfile {
  std::vector<KernelGroup> groups;  ///< longest first
  double step_ms = 0.0;             ///< from the first kernel to the last, a step
  double idle_ms = 0.0;             ///< of it, while no kernel ran
};

/// For people, a line a group.
std::string to_text(const KernelProfile& profile);

/// The kind of the kernel `name`.
std::string kernel_group(const std::string& name);

class Profiler {
 public:
  /// Profiles `steps` steps from step `first` on and writes the trace to `path`; with 0 steps it does
  /// nothing.
  Profiler(std::string path, int64_t first, int64_t steps);
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
  bool running_ = false;
  KernelProfile result_;
};

}  // namespace trireme::train
