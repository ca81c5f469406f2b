#include "trireme/plan/rates.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

/// Where a size lies on an axis: between `low` and the next size, or at an end.
struct AxisPlace {
  size_t low = 0;
  double share = 0.0;   ///< of the way to the next size
  double beyond = 1.0;  ///< times the largest
};

AxisPlace place_on(const std::vector<int64_t>& axis, double size) {
  const auto at = [&](size_t i) { return static_cast<double>(axis[i]); };
  if (size <= at(0)) return {};
  const size_t last = axis.size() - 1;
  if (size >= at(last)) return {.low = last, .beyond = size / at(last)};
  size_t low = 0;
  while (at(low + 1) <= size) ++low;
  return {.low = low, .share = (size - at(low)) / (at(low + 1) - at(low))};
}

template <typename Value>
const Value& of_dtype(const std::map<std::string, Value>& values, const std::string& dtype,
                      const std::string& device, std::string_view what) {
  const auto found = values.find(dtype);
  if (found != values.end()) return found->second;
  std::vector<std::string> there;
  for (const auto& [name, value] : values) there.push_back(name);
  throw ConfigError(
      "[plan.rates] the rates of {} have no {} in {}, but in {}; set precision.compute to one of these, or "
      "give a --probe file that has it",
      device, what, dtype, there.empty() ? "no dtype" : join(there, ", "));
}

}  // namespace

double ProductGrid::seconds_of(double rows, double columns, double inner) const {
  const AxisPlace at[] = {place_on(m, rows), place_on(n, columns), place_on(k, inner)};
  double sum = 0.0;
  for (unsigned corner = 0; corner < 8; ++corner) {
    double weight = 1.0;
    size_t index[3];
    for (unsigned axis = 0; axis < 3; ++axis) {
      const bool high = (corner >> axis & 1U) != 0;
      weight *= high ? at[axis].share : 1.0 - at[axis].share;
      index[axis] = at[axis].low + (high ? 1 : 0);
    }
    if (weight > 0.0) sum += weight * seconds[(index[0] * n.size() + index[1]) * k.size() + index[2]];
  }
  return sum * at[0].beyond * at[1].beyond * at[2].beyond;
}

double ProductGrid::most_flops() const {
  double most = 0.0;
  size_t at = 0;
  for (const int64_t rows : m) {
    for (const int64_t columns : n) {
      for (const int64_t inner : k)
        most = std::max(most, 2.0 * static_cast<double>(rows) * static_cast<double>(columns) *
                                  static_cast<double>(inner) / seconds[at++]);
    }
  }
  return most;
}

double MemoryRates::most() const {
  return std::max({copy, add, norm, norm_backward, activation, activation_backward, loss, update});
}

const LinkRate& of_ranks(const std::vector<LinkRate>& rates, int64_t ranks) {
  for (const LinkRate& rate : rates) {
    if (rate.ranks >= ranks) return rate;
  }
  return rates.back();
}

bool Rates::operator==(const Rates& other) const {
  const auto all_of = [](const Rates& rates) {
    return std::tie(rates.device, rates.on_gpu, rates.measured, rates.ranks, rates.launch_s, rates.products,
                    rates.attention, rates.memory, rates.links, rates.disk, rates.peak_flops);
  };
  return all_of(*this) == all_of(other);
}

double Rates::product(const std::string& dtype, ProductPass pass, double rows, double columns,
                      double inner) const {
  return of_dtype(products, dtype, device, "products")[static_cast<size_t>(pass)].seconds_of(rows, columns,
                                                                                             inner);
}

/// The rate of the nearest head size that was measured; between lengths a power of them.
AttentionRate Rates::attention_of(const std::string& dtype, int64_t length, int64_t head_dim) const {
  const std::vector<AttentionRate>& all = of_dtype(attention, dtype, device, "attention");
  const auto distance = [&](const AttentionRate& rate) {
    return std::abs(std::log(static_cast<double>(rate.head_dim) / static_cast<double>(head_dim)));
  };
  double nearest = distance(all.front());
  for (const AttentionRate& rate : all) nearest = std::min(nearest, distance(rate));
  AttentionRate low, high;
  for (const AttentionRate& rate : all) {
    if (distance(rate) > nearest) continue;
    if (rate.length <= length && rate.length > low.length) low = rate;
    if (rate.length >= length && (high.length == 0 || rate.length < high.length)) high = rate;
  }
  if (low.length == 0 || low.length == high.length) return high;
  if (high.length == 0) return low;
  const double share = std::log(static_cast<double>(length) / static_cast<double>(low.length)) /
                       std::log(static_cast<double>(high.length) / static_cast<double>(low.length));
  const auto between = [share](double a, double b) { return a * std::pow(b / a, share); };
  return {.length = length,
          .head_dim = head_dim,
          .forward = between(low.forward, high.forward),
          .backward = between(low.backward, high.backward)};
}

const MemoryRates& Rates::memory_of(const std::string& dtype) const {
  return of_dtype(memory, dtype, device, "rates of memory");
}

double Rates::peak_of(const std::string& dtype) const {
  const auto found = peak_flops.find(dtype);
  return found != peak_flops.end() ? found->second : fastest_product(dtype);
}

double Rates::fastest_product(const std::string& dtype) const {
  double most = 0.0;
  for (const ProductGrid& grid : of_dtype(products, dtype, device, "products"))
    most = std::max(most, grid.most_flops());
  return most;
}

}  // namespace trireme::plan
