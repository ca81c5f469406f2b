#include "trireme/plan/pipeline.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/plan/cut_work.h"
#include "trireme/plan/given_program.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/spread_head.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

constexpr size_t kMostBytes = size_t{16} << 20;  ///< of a schedule's file
/// When a model is cut: about a tenth of a second.
constexpr int64_t kMostSimulatedPasses = 1'000'000;

/// Checks the number of stages before a schedule of that size is made.
void check_stages(const Config& config, int64_t stages) {
  const bool spread = config.pipeline.spread_head;
  if (stages <= config.model.n_layers + (spread ? 0 : 1)) return;
  throw ConfigError(
      "[plan.pipeline] there are {} stages, but the model has only {} blocks{} to distribute; lower "
      "parallel.pp={}{}, or raise model.{}",
      stages, config.model.n_layers, spread ? "" : " and the head", config.parallel.pp,
      stages > config.parallel.pp ? " or the number of stages per rank (pipeline.chunks, pipeline.schedule)"
                                  : "",
      reads_images(config.model.family) ? "depth" : "n_layers");
}

Schedule schedule_of(const Config& config, int64_t micro_batches) {
  const PipelineConfig& pipeline = config.pipeline;
  const int64_t ranks = config.parallel.pp;
  if (pipeline.file.empty()) {
    check_stages(config, ranks * (takes_chunks(pipeline.schedule) ? pipeline.chunks : 1));
    try {
      return make_schedule(pipeline.schedule, {ranks, micro_batches, pipeline.chunks});
    } catch (const ConfigError& error) {
      throw ConfigError(
          "{} (parallel.pp); set pipeline.micro_batches or train.global_batch accordingly, or use another "
          "pipeline.schedule",
          error.what());
    }
  }
  Schedule schedule = read_schedule(pipeline.file, pipeline.placement);
  if (std::ssize(schedule.ranks) != ranks) {
    throw ConfigError("[plan.pipeline] the schedule in {} is for {} ranks; set parallel.pp={} (now {})",
                      pipeline.file, schedule.ranks.size(), schedule.ranks.size(), ranks);
  }
  simulate(schedule);
  return schedule;
}

/// Rings add up an element in an order that depends on its place in the buffer, and copies of tied embeddings
/// have other places than the embeddings.
void check_copies(const Config& config, const BatchPlan& batch) {
  if (!config.model.tie_embeddings || config.parallel.pp == 1) return;
  if (!keeps_copies_equal(config.parallel.comm_hook)) {
    throw ConfigError(
        "[plan.pipeline] parallel.comm_hook={} with model.tie_embeddings=true and stages: the gradients "
        "of the copies of the embeddings would be compressed differently, and the copies would drift apart; "
        "set parallel.comm_hook to none or fp16, or model.tie_embeddings to false",
        config.parallel.comm_hook);
  }
  const int64_t ranks = batch.dp_size * config.parallel.cp;
  const bool in_one_order = config.comm.reduction == Reduction::kOrdered || ranks <= 2;
  if (in_one_order) return;
  throw ConfigError(
      "[plan.pipeline] comm.reduction=backend with model.tie_embeddings=true, stages and {} data-parallel "
      "ranks: the gradients of the copies of the embeddings would be added up in different orders, and the "
      "copies would drift apart; set comm.reduction=ordered",
      ranks);
}

StageSplit split_of(const Config& config, const Schedule& schedule) {
  const StageCut& cut = config.pipeline.split;
  const int64_t stages = schedule.stages;
  const bool by_cost = cut.kind == StageCut::Kind::kCost;
  const auto parts = stage_parts(config.model, describe(config.model, config.data.seq_len),
                                 config.pipeline.spread_head, by_cost ? CutAt::kHalves : CutAt::kBlocks);
  const double spread = config.pipeline.spread_head ? head_flops(config.model) : 0.0;
  if (by_cost) return split_for(schedule, parts, spread);
  if (cut.kind == StageCut::Kind::kEven) return split_evenly(parts, stages, spread);
  if (std::ssize(cut.blocks) != stages) {
    throw ConfigError(
        "[plan.pipeline] pipeline.split={} cuts the model into {} stages, but the schedule has {}; give {} "
        "numbers",
        to_text(cut), cut.blocks.size(), stages, stages);
  }
  return split_by_blocks(parts, cut.blocks, spread);
}

PassCosts costs_of(const std::vector<PassWork>& by_stage) {
  PassCosts costs;
  costs.forward = costs.backward_input = costs.backward_weight = {};
  for (const PassWork& work : by_stage) {
    costs.forward.push_back(work.forward);
    costs.backward_input.push_back(work.backward_input);
    costs.backward_weight.push_back(work.backward_weight);
  }
  return costs;
}

/// Cuts that move as long as the simulated step becomes shorter.
class CutSearch {
 public:
  CutSearch(const Schedule& schedule, const std::vector<StagePart>& parts, std::vector<int64_t> first)
      : schedule_(schedule),
        cut_(parts, std::move(first), schedule.ranks_of_stages(), /*spread_flops=*/0.0),
        allowed_(std::ranges::max(cut_.of_ranks()) * (1.0 + kTolerance)),
        left_(kMostSimulatedPasses / (3 * schedule.stages * schedule.micro_batches)),
        seconds_(simulated()) {}

  /// The part with which each stage begins.
  const std::vector<int64_t>& run() {
    while (left_ > 0 && (move_one() || move_two())) {
    }
    return cut_.first();
  }

 private:
  static constexpr double kTolerance = 1e-9;
  static constexpr int64_t kMoves[] = {-1, 1, -2, 2};  ///< of a cut, in parts

  double simulated() {
    --left_;
    return simulate(schedule_, costs_of(cut_.work())).makespan;
  }

  bool try_move(const CutMove& one, const CutMove& other) {
    if (left_ <= 0 || !cut_.move(one, other)) return false;
    if (cut_.most_beside(one, other) <= allowed_) {
      if (const double now = simulated(); now < seconds_ * (1.0 - kTolerance)) {
        seconds_ = now;
        return true;
      }
    }
    cut_.undo(one, other);
    return false;
  }

  bool move_one() {
    bool better = false;
    for (size_t one = 1; one < cut_.cuts(); ++one) {
      for (const int64_t by : kMoves) better = try_move({one, by}, {one, 0}) || better;
    }
    return better;
  }

  bool move_two() {
    bool better = false;
    for (size_t one = 1; one < cut_.cuts() && !better; ++one) {
      for (size_t other = one + 1; other < cut_.cuts(); ++other) {
        for (const int64_t by : kMoves)
          for (const int64_t also_by : kMoves) better = try_move({one, by}, {other, also_by}) || better;
      }
    }
    return better;
  }

  const Schedule& schedule_;
  CutWork cut_;
  double allowed_;  ///< of a rank: GPUs at their power limit slow down when they never idle
  int64_t left_;    ///< simulations
  double seconds_;
};

}  // namespace

StageSplit split_for(const Schedule& schedule, const std::vector<StagePart>& parts, double spread_flops) {
  StageSplit split = split_by_cost(parts, schedule.stages, spread_flops, schedule.ranks_of_stages());
  if (spread_flops > 0.0) return split;
  return cut_at(CutSearch(schedule, parts, std::move(split.first)).run(), parts, spread_flops);
}

Schedule read_schedule(const std::string& file, Placement placement) {
  std::string text;
  try {
    text = read_text_file(file, kMostBytes);
  } catch (const EnvironmentError& error) {
    throw ConfigError(
        "[plan.pipeline] the schedule '{}' cannot be read: {}; give a CSV file (pipeline.file, --from)", file,
        error.what());
  }
  return from_csv(text, placement, file);
}

std::string schedule_text(const Config& config) {
  if (config.parallel.pp == 1 || config.pipeline.file.empty()) return {};
  return to_csv(read_schedule(config.pipeline.file, config.pipeline.placement));
}

bool keeps_copies_equal(CommHook hook) {
  return hook != CommHook::kInt8 && hook != CommHook::kTopK && hook != CommHook::kPowerSgd;
}

PipelinePlan plan_pipeline(const Config& config, const BatchPlan& batch) {
  check_copies(config, batch);
  PipelinePlan plan;
  plan.schedule = schedule_of(config, batch.accumulation);
  check_stages(config, plan.schedule.stages);
  plan.split = split_of(config, plan.schedule);
  if (config.pipeline.spread_head) spread_head(plan, config.model);
  order_as_given(plan.schedule, config);
  return plan;
}

void spread_head(PipelinePlan& plan, const ModelConfig& model) {
  plan.split.vocabulary = share_rows(model.vocab_size, std::ssize(plan.schedule.ranks), model.d_model);
  plan.schedule = spread_head(plan.schedule, work_of_passes(plan));
}

PassCosts work_of_passes(const PipelinePlan& plan) {
  const StageSplit& split = plan.split;
  PassCosts costs = costs_of(split.work);
  if (split.spread_flops == 0.0) return costs;
  return with_head_parts(plan.schedule, std::move(costs), 2.0 * split.spread_flops, split.spread_flops, 0.0);
}

}  // namespace trireme::plan
