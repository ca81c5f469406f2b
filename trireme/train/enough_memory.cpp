#include "trireme/train/enough_memory.h"

#include <c10/util/Exception.h>

#include <new>
#include <string>

#include "trireme/base/error.h"
#include "trireme/base/host.h"
#include "trireme/base/text.h"
#include "trireme/kernels/device.h"
#include "trireme/plan/memory.h"

namespace trireme::train {
namespace {

std::string in_text(int64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

}  // namespace

void check_enough_memory(const TrainOptions& run, const comm::World& world) {
  const c10::Device device = world.device();
  const plan::Device kind = device.is_cuda() ? plan::Device::kCuda : plan::Device::kCpu;
  const int64_t needed = plan::rank_bytes(run.config, world.size(), kind).least();
  if (device.is_cuda()) {
    const int64_t there = kernels::gpus().at(static_cast<size_t>(device.index())).memory_bytes;
    if (needed <= there) return;
    throw OutOfMemory("[train] a rank needs at least {}, but its GPU has {}. {}", in_text(needed),
                      in_text(there), plan::memory_advice(run.config, world.size(), kind));
  }
  const int64_t there = host_memory();
  if (needed <= there / run.local_ranks) return;
  throw OutOfMemory("[train] a rank needs at least {}, but this host has {} for its {} ranks. {}",
                    in_text(needed), in_text(there), run.local_ranks,
                    plan::memory_advice(run.config, world.size(), kind));
}

bool is_out_of_host_memory(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  const auto* const from_torch = dynamic_cast<const c10::Error*>(&error);
  // c10/core/impl/alloc_cpu.cpp has no type for it.
  return from_torch != nullptr &&
         std::string(from_torch->what_without_backtrace()).find("DefaultCPUAllocator") != std::string::npos;
}

}  // namespace trireme::train
