#pragma once
// The few things about a device that callers above need to know; the CUDA half and its CPU-only stand-in are
// separate files picked by the build.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::kernels {

struct GpuInfo {
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  int64_t memory_bytes = 0;
};

/// GPUs this process can use; empty in a build without CUDA.
std::vector<GpuInfo> gpus();

/// Makes `index` the current GPU of this thread. Throws EnvironmentError in a build without CUDA.
void set_gpu(int64_t index);

/// Waits until everything enqueued on the current GPU is done; returns at once on a CPU-only build.
void synchronize_gpu();

/// pin() page-locks `bytes` of host memory, so that GPUs copy to and from it without the host; unpin() ends
/// that. pin() returns a cudaError_t, 0 for success.
int pin(void* data, int64_t bytes);
void unpin(void* data);

/// The current stream of the current GPU, a cudaStream_t.
void* current_stream();
/// Text of a cudaError_t.
std::string gpu_error_text(int error);

struct MemoryPeak {
  int64_t allocated = 0;  ///< bytes in tensors
  int64_t active = 0;     ///< and in freed blocks that another stream may still use
  int64_t reserved = 0;   ///< bytes taken from the driver
};
/// Peaks of the caching allocator of the current GPU since the process started.
MemoryPeak gpu_memory_peak();

/// Free memory of the current GPU in bytes: what the driver still gives, and what the caching allocator holds
/// unused; 0 without a GPU.
int64_t gpu_memory_free();

/// Largest resident set of this process so far, in bytes (CPU ranks).
int64_t resident_peak();

/// bf16 dense peak of the named GPU in FLOP/s, from vendors' data sheets; 0 when unknown.
double bf16_peak_flops(const std::string& gpu_name);

/// "2.28.9", or empty without NCCL.
std::string nccl_version();

}  // namespace trireme::kernels
