#include "trireme/plan/stages.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

int64_t matrix_params(const UnitSpec& unit) {
  int64_t total = 0;
  for (const ParamSpec& param : unit.params) total += param.shape.size() == 2 ? param.numel() : 0;
  return total;
}

void check_stages(const std::vector<StagePart>& parts, int64_t stages) {
  const auto count = static_cast<int64_t>(parts.size());
  if (stages >= 1 && stages <= count) return;
  throw ConfigError("[plan.stages] {} stages, but the model has {} parts to share out; take 1 to {} stages",
                    stages, count, count);
}

StageSplit measured(std::vector<int64_t> first, const std::vector<StagePart>& parts, double spread_flops) {
  StageSplit split{.first = std::move(first), .flops = {}};
  const auto stages = static_cast<double>(split.first.size() - 1);
  for (size_t stage = 0; stage + 1 < split.first.size(); ++stage) {
    double flops = spread_flops / stages;
    for (int64_t part = split.first[stage]; part < split.first[stage + 1]; ++part)
      flops += parts[static_cast<size_t>(part)].flops;
    split.flops.push_back(flops);
  }
  return split;
}

}  // namespace

double head_flops(const ModelConfig& model) {
  return 2.0 * static_cast<double>(model.vocab_size) * static_cast<double>(model.d_model);
}

std::vector<StagePart> stage_parts(const ModelConfig& model, const ModelFacts& facts, bool spread_head) {
  const auto layers = static_cast<double>(model.n_layers);
  const double attention =
      (facts.flops_per_token / 3.0 - 2.0 * static_cast<double>(facts.matmul_params)) / layers;
  std::vector<StagePart> parts;
  for (int64_t layer = 0; layer < model.n_layers; ++layer) {
    const UnitSpec& unit = facts.units[static_cast<size_t>(1 + layer)];
    parts.push_back({unit.name, 2.0 * static_cast<double>(matrix_params(unit)) + attention, unit.numel()});
  }
  parts.front().params += facts.units.front().numel();
  if (spread_head) return parts;
  const bool untied = facts.units.back().name == kHeadUnit;
  parts.push_back(
      {kHeadUnit, head_flops(model), untied ? facts.units.back().numel() : model.vocab_size * model.d_model});
  return parts;
}

double StageSplit::busiest_share() const {
  const double all = std::accumulate(flops.begin(), flops.end(), 0.0);
  return all > 0.0 ? *std::ranges::max_element(flops) / all : 1.0;
}

StageSplit split_by_cost(const std::vector<StagePart>& parts, int64_t stages, double spread_flops) {
  check_stages(parts, stages);
  const size_t count = parts.size(), wanted = static_cast<size_t>(stages);
  std::vector<double> before(count + 1, 0.0);  // FLOPs of the parts before this one
  for (size_t part = 0; part < count; ++part) before[part + 1] = before[part] + parts[part].flops;
  // best[s][n]: the smallest possible largest stage when the first n parts make s stages.
  constexpr double kNone = std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> best(wanted + 1, std::vector<double>(count + 1, kNone));
  std::vector<std::vector<size_t>> cut(wanted + 1, std::vector<size_t>(count + 1, 0));
  best[0][0] = 0.0;
  for (size_t stage = 1; stage <= wanted; ++stage) {
    for (size_t end = stage; end <= count; ++end) {
      for (size_t begin = stage - 1; begin < end; ++begin) {
        const double largest = std::max(best[stage - 1][begin], before[end] - before[begin]);
        if (largest >= best[stage][end]) continue;
        best[stage][end] = largest;
        cut[stage][end] = begin;
      }
    }
  }
  std::vector<int64_t> first(wanted + 1);
  size_t end = count;
  for (size_t stage = wanted; stage > 0; --stage) {
    first[stage] = static_cast<int64_t>(end);
    end = cut[stage][end];
  }
  return measured(std::move(first), parts, spread_flops);
}

StageSplit split_evenly(const std::vector<StagePart>& parts, int64_t stages, double spread_flops) {
  check_stages(parts, stages);
  const auto count = static_cast<int64_t>(parts.size());
  const bool has_head = parts.back().name == kHeadUnit;
  const int64_t blocks = has_head ? count - 1 : count;
  std::vector<int64_t> first(static_cast<size_t>(stages + 1), 0);
  for (int64_t stage = 0; stage < stages; ++stage) {
    const int64_t here = blocks / stages + (stage < blocks % stages ? 1 : 0);
    first[static_cast<size_t>(stage + 1)] = first[static_cast<size_t>(stage)] + here;
  }
  first.back() = count;
  return measured(std::move(first), parts, spread_flops);
}

}  // namespace trireme::plan
