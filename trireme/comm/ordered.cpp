#include "trireme/comm/ordered.h"

#include <ATen/ATen.h>

#include <vector>

#include "trireme/base/error.h"
#include "trireme/kernels/tree_sum.h"

namespace trireme::comm {
namespace {

template <typename Value>
std::vector<const Value*> row_pointers(const at::Tensor& rows, int64_t ranks) {
  const auto* const first = static_cast<const Value*>(rows.const_data_ptr());
  std::vector<const Value*> pointers;
  for (int64_t r = 0; r < ranks; ++r) pointers.push_back(first + r * (rows.numel() / ranks));
  return pointers;
}

void tree_sum_on_cpu(at::Tensor& output, const at::Tensor& rows, int64_t ranks) {
  auto* const out = output.mutable_data_ptr<float>();
  if (rows.scalar_type() == at::kFloat) {
    kernels::tree_sum(out, row_pointers<float>(rows, ranks), output.numel());
  } else {
    kernels::tree_sum_bf16(out, row_pointers<uint16_t>(rows, ranks), output.numel());
  }
}

}  // namespace

void check_ordered(const Call& call, const at::Tensor& output, const at::Tensor& input) {
  check_tensor(call, "output", output);
  check_tensor(call, "input", input);
  const bool travels = input.scalar_type() == at::kFloat || input.scalar_type() == at::kBFloat16;
  if (output.scalar_type() != at::kFloat || !travels) {
    throw LogicError(
        "[comm.reduce_scatter_ordered] output is {} and input is {} in group {}; output must be float, and "
        "input float or bfloat16",
        c10::toString(output.scalar_type()), c10::toString(input.scalar_type()), call.group);
  }
  if (output.numel() * call.size != input.numel()) {
    throw LogicError(
        "[comm.reduce_scatter_ordered] input has {} elements and output has {} in group {} of {} ranks, but "
        "input must be ranks * output; pad to a multiple of the group size",
        input.numel(), output.numel(), call.group, call.size);
  }
}

void tree_sum(at::Tensor& output, const at::Tensor& rows, int64_t ranks) {
  rows.is_cpu() ? tree_sum_on_cpu(output, rows, ranks) : tree_sum_on_gpu(output, rows, ranks);
}

}  // namespace trireme::comm
