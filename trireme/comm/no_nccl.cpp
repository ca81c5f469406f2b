#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "trireme/base/error.h"
#include "trireme/comm/backend.h"
#include "trireme/comm/device_watch.h"
#include "trireme/comm/gpu_link.h"
#include "trireme/comm/ordered.h"
#include "trireme/comm/peer_memory.h"

namespace trireme::comm {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec) {
  throw EnvironmentError(
      "[comm.make_group] group {} runs on {}, but this build has no NCCL; build with -DTRIREME_CUDA=ON or "
      "set device=cpu",
      spec.name, spec.device.str());
}

std::unique_ptr<WatchedDevice> watched_gpu(c10::Device device) {
  throw LogicError("[comm.make_group] {} cannot be watched: this build has no CUDA", device.str());
}

std::unique_ptr<MemoryOffer> offer_gpu_memory(int64_t, int64_t, c10::Device, const PeerOptions&) {
  return {};
}

std::shared_ptr<Link> make_gpu_link(LinkEnd end, std::shared_ptr<Group>, std::shared_ptr<PairGroups>) {
  throw LogicError("[comm.make_link] link {} is on {}, but this build has no CUDA", end.name,
                   end.device.str());
}

std::shared_ptr<Link> make_gpu_copy_link(const LinkEnd&,
                                         const std::function<std::string(const std::string&)>&) {
  return {};
}

void tree_sum_on_gpu(at::Tensor&, const at::Tensor& rows, int64_t) {
  throw LogicError("[comm.reduce_scatter_ordered] the tensor is on {}, but this build has no CUDA",
                   rows.device().str());
}

}  // namespace trireme::comm
