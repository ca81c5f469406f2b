#include <ATen/ATen.h>

#include <vector>

#include "trireme/base/error.h"
#include "trireme/comm/backend.h"
#include "trireme/comm/checks.h"
#include "trireme/comm/group.h"
#include "trireme/kernels/tree_sum.h"

namespace trireme::comm {
namespace {

void check_arguments(const Group& group, const at::Tensor& output, const at::Tensor& input) {
  const Call call{"reduce_scatter_ordered", group.name(), group.size(), group.device()};
  check_tensor(call, "output", output);
  check_tensor(call, "input", input);
  const bool travels = input.scalar_type() == at::kFloat || input.scalar_type() == at::kBFloat16;
  if (output.scalar_type() != at::kFloat || !travels) {
    throw LogicError(
        "[comm.reduce_scatter_ordered] output is {}, input is {} in group {}; output must be float, input "
        "float or bfloat16",
        c10::toString(output.scalar_type()), c10::toString(input.scalar_type()), group.name());
  }
  if (output.numel() * group.size() != input.numel()) {
    throw LogicError(
        "[comm.reduce_scatter_ordered] input has {} elements, output has {} in group {} of {} ranks: "
        "needed is input = ranks * output; pad to a multiple of the group",
        input.numel(), output.numel(), group.name(), group.size());
  }
}

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

void reduce_scatter_ordered(Group& group, at::Tensor& output, const at::Tensor& input) {
  check_arguments(group, output, input);
  if (group.size() == 1) {
    output.detach().view({-1}).copy_(input.detach().view({-1}));
    return;
  }
  const auto bytes = static_cast<int64_t>(input.nbytes());
  at::Tensor rows = group.scratch(bytes).narrow(0, 0, bytes).view(input.scalar_type());  // (n*m)
  group.all_to_all(rows, input);
  group.device().is_cpu() ? tree_sum_on_cpu(output, rows, group.size())
                          : tree_sum_on_gpu(output, rows, group.size());
}

}  // namespace trireme::comm
