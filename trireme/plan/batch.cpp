#include "trireme/plan/batch.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/plan/pipeline.h"

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
  const std::string parts =
      micro_batch == 0 ? fmt::format("equal shares of {} ranks", dp_size)
                       : fmt::format("micro_batch {} x accumulation x {} ranks", micro_batch, dp_size);
  throw ConfigError("[plan.batch] global_batch {} cannot be split into {}; {}", global_batch, parts, fix);
}

/// A multiple of the ranks where the batch has one, since some schedules take nothing else.
int64_t micro_batches_for(int64_t per_rank, int64_t pp) {
  constexpr int64_t kEnough = 4;  // the bubble of 1f1b is then a fifth
  int64_t best = 1;
  for (int64_t count = 1; count <= std::min(per_rank, kEnough * pp); ++count) {
    if (per_rank % count != 0) continue;
    if (count % pp == 0 || best % pp != 0) best = count;
  }
  return best;
}

/// The number that the pipeline's keys ask for; 0: they name none, or there is no pipeline.
int64_t micro_batches_wanted(const Config& config, int64_t pp) {
  const int64_t wanted = pp > 1 ? config.pipeline.micro_batches : 0;
  if (pp == 1 || config.pipeline.file.empty()) return wanted;
  const int64_t scheduled = read_schedule(config.pipeline.file, config.pipeline.placement).micro_batches;
  if (wanted != 0 && wanted != scheduled) {
    throw ConfigError(
        "[plan.batch] pipeline.micro_batches={}, but the schedule in {} has {}; remove "
        "pipeline.micro_batches",
        wanted, config.pipeline.file, scheduled);
  }
  return scheduled;
}

}  // namespace

BatchPlan plan_batch(const Config& config, const MeshShape& mesh) {
  const TrainConfig& train = config.train;
  const int64_t dp_size = mesh.dp_size(), pp = mesh.size(Axis::kPp);
  int64_t wanted = micro_batches_wanted(config, pp);
  const bool by_rank = train.rank_batch > 0;
  const int64_t global_batch = by_rank ? train.rank_batch * dp_size : train.global_batch;
  if (by_rank && train.micro_batch > 0 && train.rank_batch % train.micro_batch != 0) {
    throw ConfigError(
        "[plan.batch] train.rank_batch={} is not a multiple of train.micro_batch={}; set train.rank_batch to "
        "{}, or train.micro_batch to {}",
        train.rank_batch, train.micro_batch, nearest_multiples(train.rank_batch, train.micro_batch),
        nearest_divisors(train.rank_batch, train.micro_batch));
  }
  BatchPlan batch = plan_batch(global_batch, train.micro_batch, dp_size);
  if (pp == 1 || (train.micro_batch > 0 && wanted == 0)) return batch;
  const int64_t per_rank = batch.global_batch / dp_size, of_key = by_rank ? 1 : dp_size;
  const std::string_view key = by_rank ? "train.rank_batch" : "train.global_batch";
  if (wanted == 0) wanted = micro_batches_for(per_rank, pp);
  if (train.micro_batch > 0 && batch.accumulation != wanted) {
    throw ConfigError(
        "[plan.batch] global_batch {} = micro_batch {} x {} micro-batches x {} ranks, but the pipeline has "
        "{} "
        "micro-batches; set train.micro_batch to 0 or {} to {}",
        batch.global_batch, batch.micro_batch, batch.accumulation, dp_size, wanted, key,
        batch.micro_batch * wanted * of_key);
  }
  if (per_rank % wanted != 0) {
    throw ConfigError(
        "[plan.batch] {} micro-batches do not divide the {} sequences of a pipeline ({}={}{}); "
        "set pipeline.micro_batches to {}, or {} to {}",
        wanted, per_rank, key, per_rank * of_key,
        by_rank ? "" : fmt::format(" / {} data-parallel ranks", dp_size), nearest_divisors(per_rank, wanted),
        key, nearest_multiples(per_rank * of_key, wanted * of_key));
  }
  batch.micro_batch = per_rank / wanted;
  batch.accumulation = wanted;
  return batch;
}

BatchPlan plan_batch(int64_t global_batch, int64_t micro_batch, int64_t dp_size) {
  TRIREME_CHECK(dp_size >= 1, "[plan.batch] dp_size={} must be at least 1", dp_size);
  if (global_batch < 1 || micro_batch < 0) {
    throw ConfigError(
        "[plan.batch] train.global_batch={} must be at least 1 and train.micro_batch={} at least 0",
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
