#include <ATen/ATen.h>

#include "trireme/comm/group.h"

namespace trireme::comm {

std::vector<std::vector<double>> gather_scalars(Group& group, const std::vector<double>& values) {
  return gather_values(group, at::tensor(values, at::kDouble).to(group.device()));
}

std::vector<std::vector<double>> gather_values(Group& group, const at::Tensor& values) {
  at::Tensor all = at::empty({group.size(), values.numel()}, values.options());  // (n, k)
  group.all_gather(all, values);
  const at::Tensor host = all.cpu();
  group.check();
  std::vector<std::vector<double>> rows;
  const auto* value = host.const_data_ptr<double>();
  for (int64_t r = 0; r < group.size(); ++r, value += values.numel())
    rows.emplace_back(value, value + values.numel());
  return rows;
}

}  // namespace trireme::comm
