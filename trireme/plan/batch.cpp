#include "trireme/plan/batch.h"

#include <algorithm>
#include <string>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

/// "8 or 16": the multiples of `step` around `value`, both at least `step`.
std::string nearest_multiples(int64_t value, int64_t step) {
  const int64_t below = value / step * step;
  return below == 0 ? std::to_string(step) : fmt::format("{} or {}", below, below + step);
}

/// "2 or 5": the divisors of `value` around `wanted`, which is none of them.
std::string nearest_divisors(int64_t value, int64_t wanted) {
  int64_t below = std::min(wanted, value);
  while (value % below != 0) --below;
  if (below == value) return std::to_string(value);
  int64_t above = wanted;
  while (value % above != 0) ++above;
  return fmt::format("{} or {}", below, above);
}

[[noreturn]] void throw_indivisible(int64_t global_batch, int64_t micro_batch, int64_t dp_size) {
  std::string fix = fmt::format("set train.global_batch to {}",
                                nearest_multiples(global_batch, dp_size * std::max<int64_t>(micro_batch, 1)));
  if (global_batch % dp_size == 0) {
    fix += fmt::format(", or train.micro_batch to {}", nearest_divisors(global_batch / dp_size, micro_batch));
  }
  throw ConfigError(
      "[plan.batch] global_batch {} = micro_batch {} x accumulation ? x {} ranks does not divide; {}",
      global_batch, micro_batch == 0 ? "?" : std::to_string(micro_batch), dp_size, fix);
}

}  // namespace

BatchPlan plan_batch(int64_t global_batch, int64_t micro_batch, int64_t dp_size) {
  TRIREME_CHECK(dp_size >= 1, "[plan.batch] dp_size={}", dp_size);
  if (global_batch < 1 || micro_batch < 0) {
    throw ConfigError(
        "[plan.batch] train.global_batch={}, train.micro_batch={}: they must be at least 1 and 0",
        global_batch, micro_batch);
  }
  if (global_batch % dp_size != 0) throw_indivisible(global_batch, micro_batch, dp_size);
  const int64_t per_rank = global_batch / dp_size;
  if (micro_batch == 0) micro_batch = per_rank;
  if (per_rank % micro_batch != 0) throw_indivisible(global_batch, micro_batch, dp_size);
  return {.global_batch = global_batch,
          .micro_batch = micro_batch,
          .accumulation = per_rank / micro_batch,
          .dp_size = dp_size};
}

}  // namespace trireme::plan
