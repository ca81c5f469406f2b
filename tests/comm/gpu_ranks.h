#pragma once
// Ranks as processes with a GPU each.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string_view>

#include "tests/comm/processes.h"
#include "trireme/base/hash.h"
#include "trireme/comm/group.h"
#include "trireme/comm/world.h"
#include "trireme/kernels/device.h"

namespace trireme::test {

/// Counted in a child, because a process that has touched a GPU must not fork.
inline int count_gpus() {
  static const int gpus =
      fork_ranks(1, [](int64_t) { return static_cast<int>(kernels::gpus().size()); }).front();
  return gpus;
}

inline std::shared_ptr<comm::World> join_gpus(int64_t rank, int64_t size, int64_t port, double timeout_s,
                                              comm::PeerOptions peers = {}) {
  plan::WorldSpec spec;
  spec.rank = spec.local_rank = rank;
  spec.world_size = spec.local_world_size = size;
  spec.master_port = port;
  kernels::set_gpu(rank);
  return comm::World::join(spec, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(rank)), timeout_s,
                           peers);
}

/// A world of the first GPU alone.
inline std::shared_ptr<comm::World> one_gpu() {
  return comm::World::join_store(c10::make_intrusive<c10d::HashStore>(), 0, 1, c10::Device(c10::kCUDA, 0),
                                 /*timeout_s=*/60.0);
}

/// 0 when all hold; each failure is printed.
class Expectations {
 public:
  void is_true(bool holds, std::string_view what) {
    if (holds) return;
    fmt::print(stderr, "does not hold: {}\n", what);
    ++failures_;
  }
  int code() const { return std::min(failures_, 99); }

 private:
  int failures_ = 0;
};

/// Equal bits.
inline bool same(const at::Tensor& got, const at::Tensor& wanted) {
  return at::equal(got.cpu().view({-1}).view(at::kByte), wanted.cpu().view({-1}).view(at::kByte));
}

/// (count) fp32 over many binades, so that another order of additions gives other bits.
inline at::Tensor gradient_of(int64_t rank, int64_t count) {
  at::Tensor values = at::empty({count});
  float* out = values.mutable_data_ptr<float>();
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bits = mix64(static_cast<uint64_t>(rank), static_cast<uint64_t>(i));
    out[i] = std::ldexp(static_cast<float>(bits >> 40) / 16777216.0f - 0.5f, static_cast<int>(bits % 18));
  }
  return values;
}

}  // namespace trireme::test
