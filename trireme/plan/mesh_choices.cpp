#include "trireme/plan/mesh_choices.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/recompute.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/plan/token_split.h"

namespace trireme::plan {
namespace {

/// Bytes of the transfers for which `counts` holds.
template <typename Counts>
int64_t bytes_of_transfers(StepProgram program, int64_t micro_batches, Counts counts) {
  for (Action& action : program.actions)
    std::erase_if(action.transfers,
                  [&](const Transfer& transfer) { return !counts(action, transfer.along); });
  return program.wire_bytes(micro_batches);
}

/// Ranks from one end of an axis to the other, counted in ranks of the mesh: hosts have neighbouring ranks.
int64_t span_to(const MeshShape& mesh, Axis axis) {
  int64_t span = 1;
  for (size_t inner = static_cast<size_t>(axis); inner < kAxes; ++inner)
    span *= mesh.size(static_cast<Axis>(inner));
  return span;
}

/// Whether no group along `axis` has ranks of two hosts.
bool stays_within_hosts(const MeshShape& mesh, Axis axis, int64_t host_ranks) {
  if (mesh.world_size() <= host_ranks) return true;
  const int64_t span = span_to(mesh, axis);
  return span <= host_ranks && host_ranks % span == 0;
}

double seconds_to_send(const AxisBytes& sent, const MeshShape& mesh, const RankSpeed& speed) {
  const auto seconds = [&](int64_t bytes, Axis axis) {
    const bool within = stays_within_hosts(mesh, axis, speed.host_ranks);
    return static_cast<double>(bytes) / (within ? speed.bytes : speed.bytes_between);
  };
  return seconds(sent.data, Axis::kDpReplicate) + seconds(sent.tp, Axis::kTp) + seconds(sent.cp, Axis::kCp) +
         seconds(sent.stages, Axis::kPp);
}

Config with_mesh(Config config, int64_t pp, int64_t cp, int64_t tp) {
  config.parallel.pp = pp;
  config.parallel.cp = cp;
  config.parallel.tp = tp;
  config.parallel.dp_shard = 0;
  return config;
}

/// Fills in what is known of a mesh that works. Throws ConfigError where the run would be refused.
void weigh(MeshChoice& choice, const Config& given, int64_t ranks, Device device, const RankSpeed& speed) {
  check_config(given);
  choice.mesh = MeshShape::fit(given.parallel, ranks);
  choice.batch = plan_batch(given, choice.mesh);
  const Config config = settle_recompute(with_possible_fp8(given, device, choice.batch), device);
  const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory,
                                    largest_split(config.parallel));
  const EngineSetting setting = engine_setting(config, choice.mesh, choice.batch.accumulation, device);
  PipelinePlan plan;
  if (config.parallel.pp > 1) {
    plan = plan_pipeline(config, choice.batch);
    choice.idle = 1.0 - simulate(plan.schedule, work_of_passes(plan)).efficiency();
  }
  const std::vector<StepProgram> programs = config_programs(config, facts, choice.batch, setting, plan);
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    const RankBytes needed =
        rank_bytes(config, facts, choice.batch, programs[rank], device, plan, static_cast<int64_t>(rank));
    if (rank == 0 || needed.peak() > choice.needed.peak()) choice.needed = needed;
    const AxisBytes sent = bytes_by_axis(programs[rank], choice.batch.accumulation);
    if (sent.total() > choice.sent.total()) choice.sent = sent;
  }
  const double tokens = static_cast<double>(choice.batch.global_batch) *
                        static_cast<double>(reads_images(config.model.family) ? 1 : config.data.seq_len);
  const ModelFacts whole = describe(config.model, config.data.seq_len, config.precision, config.memory);
  const double flops = whole.flops_per_token + repeated_flops(config);
  choice.computing_s = flops * tokens / static_cast<double>(ranks) / speed.flops;
  choice.idle_s = choice.computing_s * choice.idle / (1.0 - choice.idle);
  choice.sending_s = seconds_to_send(choice.sent, choice.mesh, speed);
}

MeshChoice choice_of(const Config& config, int64_t ranks, Device device, const RankSpeed& speed) {
  const ParallelConfig& parallel = config.parallel;
  MeshChoice choice{.mesh = MeshShape({parallel.pp, 1, ranks / parallel.pp / parallel.cp / parallel.tp,
                                       parallel.cp, parallel.tp})};
  try {
    weigh(choice, config, ranks, device, speed);
    choice.cp_kind = settled_cp_kind(config);
  } catch (const ConfigError& error) {
    choice.obstacle = error.what();
  }
  return choice;
}

std::vector<int64_t> divisors_of(int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t divisor = 1; divisor <= number; ++divisor) {
    if (number % divisor == 0) divisors.push_back(divisor);
  }
  return divisors;
}

}  // namespace

int64_t AxisBytes::total() const {
  int64_t sum = 0;
  for (const int64_t bytes : {data, tp, cp, stages}) {
    if (__builtin_add_overflow(sum, bytes, &sum)) return std::numeric_limits<int64_t>::max();
  }
  return sum;
}

AxisBytes bytes_by_axis(const StepProgram& program, int64_t micro_batches) {
  const auto along = [&](Along wanted) {
    return bytes_of_transfers(program, micro_batches, [wanted](const Action& action, Along of) {
      return !action.is_message() && of == wanted;
    });
  };
  return {.data = along(Along::kData),
          .tp = along(Along::kTp),
          .cp = along(Along::kCp),
          .stages = bytes_of_transfers(program, micro_batches,
                                       [](const Action& action, Along) { return action.is_message(); })};
}

RankSpeed usual_speed(Device device) {
  if (device == Device::kCuda)
    return {.flops = 400e12, .bytes = 300e9, .bytes_between = 50e9, .host_ranks = 8};
  return {.flops = 50e9, .bytes = 2e9, .bytes_between = 1e9, .host_ranks = 64};
}

std::vector<MeshChoice> mesh_choices(const Config& config, int64_t ranks, Device device,
                                     const RankSpeed& speed, int64_t rank_memory) {
  std::vector<MeshChoice> choices;
  for (const int64_t pp : divisors_of(ranks)) {
    for (const int64_t cp : divisors_of(ranks / pp)) {
      for (const int64_t tp : divisors_of(ranks / pp / cp))
        choices.push_back(choice_of(with_mesh(config, pp, cp, tp), ranks, device, speed));
    }
  }
  const auto place = [rank_memory](const MeshChoice& choice) {
    return std::pair(choice.works() ? (choice.fits(rank_memory) ? 0 : 1) : 2, choice.lost());
  };
  std::ranges::stable_sort(choices, {}, place);
  return choices;
}

}  // namespace trireme::plan
