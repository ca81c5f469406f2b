#include <ATen/ATen.h>

#include "trireme/comm/group.h"

namespace trireme::comm {
namespace {

constexpr uint64_t kHalf = uint64_t{1} << 32;

}  // namespace

at::Tensor gather_rows(Group& group, const at::Tensor& values) {
  at::Tensor all = at::empty({group.size(), values.numel()}, values.options());
  group.all_gather(all, values);
  return all;
}

std::vector<std::vector<double>> to_numbers(const at::Tensor& rows) {
  const at::Tensor host = rows.cpu();
  std::vector<std::vector<double>> numbers;
  const auto* value = host.const_data_ptr<double>();
  for (int64_t r = 0; r < host.size(0); ++r, value += host.size(1))
    numbers.emplace_back(value, value + host.size(1));
  return numbers;
}

std::vector<std::vector<double>> gather_scalars(Group& group, const std::vector<double>& values) {
  const at::Tensor rows = gather_rows(group, at::tensor(values, at::kDouble).to(group.device()));
  std::vector<std::vector<double>> numbers = to_numbers(rows);
  group.check();
  return numbers;
}

std::array<double, 2> in_halves(uint64_t word) {
  return {static_cast<double>(word / kHalf), static_cast<double>(word % kHalf)};
}

uint64_t from_halves(double upper, double lower) {
  return static_cast<uint64_t>(upper) * kHalf + static_cast<uint64_t>(lower);
}

}  // namespace trireme::comm
