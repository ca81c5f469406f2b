#include <ATen/ATen.h>

#include "trireme/comm/group.h"

namespace trireme::comm {

std::vector<std::vector<double>> gather_scalars(Group& group, const std::vector<double>& values) {
  const at::Tensor mine = at::tensor(values, at::kDouble).to(group.device());  // (k)
  at::Tensor all = at::empty({group.size(), mine.numel()}, mine.options());    // (n, k)
  group.all_gather(all, mine);
  const at::Tensor host = all.cpu();
  group.check();
  std::vector<std::vector<double>> rows;
  const auto* value = host.const_data_ptr<double>();
  for (int64_t r = 0; r < group.size(); ++r, value += mine.numel())
    rows.emplace_back(value, value + mine.numel());
  return rows;
}

}  // namespace trireme::comm
