#pragma once
// The libraries that connect ranks and move bytes: gloo.cpp is always there; the build picks nccl.cpp, or
// no_nccl.cpp for what a CPU build lacks. Internal to this room.
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

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

/// Connects all pairs over TCP, for which it may wait for five times the deadline. Its operations return when
/// they are done.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendSpec& spec);

/// Makes the NCCL communicator. Its operations go to the current stream. Throws EnvironmentError without
/// NCCL.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec);

}  // namespace trireme::comm
