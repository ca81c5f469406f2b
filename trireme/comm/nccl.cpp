#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <chrono>
#include <cmath>

#include "trireme/base/env.h"
#include "trireme/comm/backend.h"

namespace trireme::comm {
namespace {

using Options = c10d::ProcessGroupNCCL::Options;

c10::intrusive_ptr<Options> options_for(const BackendSpec& spec) {
  auto options = Options::create();
  // DeviceWatch keeps the deadline; torch's must come later.
  options->timeout = std::chrono::milliseconds(std::llround(2000.0 * spec.timeout_s) + 60'000);
  options->group_name = spec.name;
  for (const int64_t rank : spec.ranks) options->global_ranks_in_group.push_back(static_cast<uint64_t>(rank));
  return options;
}

/// DeviceWatch does what torch's own watchdog would do: that one rethrows in its thread, which ends the
/// process, and asks the store once a second whether to dump.
void configure_torch() {
  set_process_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0");
  set_process_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "0");
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec) {
  configure_torch();
  const c10::cuda::CUDAGuard guard(spec.device);
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      spec.store, static_cast<int>(spec.rank), static_cast<int>(spec.ranks.size()), options_for(spec));
  backend->setBoundDeviceId(spec.device);
  backend->eagerConnectSingleDevice(spec.device);
  return backend;
}

}  // namespace trireme::comm
