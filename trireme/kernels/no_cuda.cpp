#include "trireme/base/error.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/range.h"

namespace trireme::kernels {

std::vector<GpuInfo> gpus() {
  return {};
}

void set_gpu(int64_t index) {
  throw EnvironmentError(
      "[kernels.device] GPU {} was requested, but this build has no CUDA; build with -DTRIREME_CUDA=ON or "
      "set device=cpu",
      index);
}

void synchronize_gpu() {}
int pin(void*, int64_t) {
  return 0;
}
void unpin(void*) {}
void* current_stream() {
  return nullptr;
}
std::string gpu_error_text(int error) {
  return std::to_string(error);
}
MemoryPeak gpu_memory_peak() {
  return {};
}
int64_t gpu_memory_free() {
  return 0;
}
std::string nccl_version() {
  return {};
}

}  // namespace trireme::kernels
