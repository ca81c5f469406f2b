#pragma once
// What arguments of collectives must be. All throw LogicError that names the operation, the group and both
// numbers.
#include <c10/core/Device.h>

#include <cstdint>
#include <string_view>

namespace at {
class Tensor;
}

namespace trireme::comm {

/// The call that is checked.
struct Call {
  std::string_view operation;
  std::string_view group;
  int64_t size = 1;
  c10::Device device = c10::kCPU;
};

/// Checks that `tensor` is contiguous and on the group's device.
void check_tensor(const Call& call, std::string_view role, const at::Tensor& tensor);

/// Checks both tensors as check_tensor() does, that their dtypes are equal, and that output.numel() /
/// out_parts is input.numel() / in_parts without a remainder.
void check_pair(const Call& call, const at::Tensor& output, int64_t out_parts, const at::Tensor& input,
                int64_t in_parts);

/// Checks that every backend can add and compare the dtype.
void check_reducible(const Call& call, const at::Tensor& tensor);

/// Checks that `rank` is a group rank; check_peer() also that it is not `own`.
void check_root(const Call& call, int64_t rank);
void check_peer(const Call& call, int64_t rank, int64_t own);

}  // namespace trireme::comm
