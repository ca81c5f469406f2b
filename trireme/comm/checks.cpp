#include "trireme/comm/checks.h"

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>

#include "trireme/base/error.h"

namespace trireme::comm {

void check_tensor(const Call& call, std::string_view role, const at::Tensor& tensor) {
  if (tensor.device() != call.device) {
    throw LogicError("[comm.{}] {} is on {}, but group {} is on {}; move it there first", call.operation,
                     role, tensor.device().str(), call.group, call.device.str());
  }
  if (!tensor.is_contiguous()) {
    throw LogicError(
        "[comm.{}] {} of shape ({}) and strides ({}) in group {} is not contiguous; pass tensor.contiguous()",
        call.operation, role, fmt::join(tensor.sizes(), ", "), fmt::join(tensor.strides(), ", "), call.group);
  }
}

void check_pair(const Call& call, const at::Tensor& output, int64_t out_parts, const at::Tensor& input,
                int64_t in_parts) {
  check_tensor(call, "output", output);
  check_tensor(call, "input", input);
  if (output.scalar_type() != input.scalar_type()) {
    throw LogicError("[comm.{}] output is {} but input is {} in group {}; use one dtype", call.operation,
                     c10::toString(output.scalar_type()), c10::toString(input.scalar_type()), call.group);
  }
  if (output.numel() % out_parts != 0 || output.numel() * in_parts != input.numel() * out_parts) {
    throw LogicError(
        "[comm.{}] output has {} elements and input has {} in group {} of {} ranks, but output / {} must "
        "equal input / {}; pad to a multiple of the group size",
        call.operation, output.numel(), input.numel(), call.group, call.size, out_parts, in_parts);
  }
}

void check_reducible(const Call& call, const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kInt:
    case at::kLong:
    case at::kChar:
    case at::kByte:
      return;
    default:
      throw LogicError(
          "[comm.{}] {} in group {} cannot be reduced; convert to float, double, half, bfloat16, int, "
          "long, char or byte",
          call.operation, c10::toString(tensor.scalar_type()), call.group);
  }
}

void check_root(const Call& call, int64_t rank) {
  if (rank < 0 || rank >= call.size) {
    throw LogicError("[comm.{}] rank {} is outside group {} with ranks 0 to {}", call.operation, rank,
                     call.group, call.size - 1);
  }
}

void check_peer(const Call& call, int64_t rank, int64_t own) {
  check_root(call, rank);
  if (rank == own) {
    throw LogicError("[comm.{}] rank {} of group {} cannot be its own peer", call.operation, rank,
                     call.group);
  }
}

}  // namespace trireme::comm
