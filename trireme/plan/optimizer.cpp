#include "trireme/plan/optimizer.h"

#include <array>
#include <iterator>

#include "trireme/base/error.h"
#include "trireme/plan/flat_layout.h"

namespace trireme::plan {
namespace {

constexpr std::array<std::string_view, 2> kAdamWState = {"exp_avg", "exp_avg_sq"};
constexpr std::array<std::string_view, 1> kAdamWSquares = {"exp_avg_sq"};
constexpr std::array<std::string_view, 3> kAdamWKeys = {"optim.beta1", "optim.beta2", "optim.eps"};
constexpr std::array<std::string_view, 1> kSgdState = {"momentum_buffer"};
constexpr std::array<std::string_view, 2> kSgdKeys = {"optim.momentum", "optim.nesterov"};

constexpr OptimizerRecord kOptimizerRecords[] = {
    {.name = OptimizerName::kAdamW, .state = kAdamWState, .squares = kAdamWSquares, .keys = kAdamWKeys},
    {.name = OptimizerName::kSgd, .state = kSgdState, .squares = {}, .keys = kSgdKeys},
};
static_assert(std::size(kOptimizerRecords) == kNames<OptimizerName>.size());

}  // namespace

const OptimizerRecord& record_of(OptimizerName name) {
  for (const OptimizerRecord& record : kOptimizerRecords) {
    if (record.name == name) return record;
  }
  throw LogicError("[plan.optimizer] optimizer {} has no record", static_cast<int>(name));
}

std::vector<std::string_view> state_of(const OptimConfig& config) {
  const OptimizerRecord& record = record_of(config.name);
  std::vector<std::string_view> names(record.state.begin(), record.state.end());
  if (config.ema > 0.0) names.push_back(kAverageState);
  return names;
}

int64_t state_bytes_of_block(const OptimConfig& config) {
  constexpr int64_t kElements = FlatLayout::kAlignment, kFp32 = 4, kBf16 = 2, kExponent = 1;
  const auto bytes = [&]() -> int64_t {
    switch (config.state) {
      case OptimState::kFp32:
        return kElements * kFp32;
      case OptimState::kBf16:
        return kElements * kBf16;
      case OptimState::kInt8:
        break;
    }
    return kElements + kExponent;
  };
  return std::ssize(record_of(config.name).state) * bytes() + (config.ema > 0.0 ? kElements * kFp32 : 0);
}

}  // namespace trireme::plan
