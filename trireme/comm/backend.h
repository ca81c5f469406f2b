#pragma once
// What a GPU build adds and a CPU build lacks, behind one set of functions: nccl.cpp and device_watch.cpp, or
// no_nccl.cpp, picked by the build. gloo.cpp is always there. Internal to this room.
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/operation.h"

namespace at {
class Tensor;
}
namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace trireme::comm {

/// A member of a group that is about to be connected.
struct BackendSpec {
  c10::intrusive_ptr<c10d::Store> store;  ///< for this group alone
  std::string name;
  std::vector<int64_t> ranks;  ///< global ranks
  int64_t rank = 0;            ///< within the group
  c10::Device device = c10::kCPU;
  double timeout_s = 0.0;
  std::string address;  ///< where the other ranks reach this one
};

/// Connects all pairs over TCP. Its operations return when they are done.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendSpec& spec);

/// Makes the NCCL communicator. Its operations go to the current stream. Throws EnvironmentError without
/// NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec);

/// Deadlines for operations that a GPU finishes long after the host has moved on.
class DeviceWatch {
 public:
  virtual ~DeviceWatch() = default;
  /// `operation` was enqueued on the current stream.
  virtual void enqueued(const Operation& operation) = 0;
};

/// Called from another thread, at most once: `operation` has run for `elapsed_s`.
using Expired = std::function<void(const Operation& operation, double elapsed_s)>;

std::unique_ptr<DeviceWatch> make_device_watch(c10::Device device, double timeout_s, Expired expired);

/// output (m) fp32 = the tree sum of rows (n*m), on the current stream of their GPU; see kernels/tree_sum.h.
void tree_sum_on_gpu(at::Tensor& output, const at::Tensor& rows, int64_t ranks);

}  // namespace trireme::comm
