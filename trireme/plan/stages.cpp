#include "trireme/plan/stages.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/cut_work.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/model_family.h"

namespace trireme::plan {
namespace {

/// Elements of the matrices among some parameters.
int64_t matrix_params(const std::vector<ParamSpec>& params) {
  int64_t total = 0;
  for (const ParamSpec& param : params) total += param.shape.size() == 2 ? param.numel() : 0;
  return total;
}

/// The parameters of a block's attention alone, or the others.
UnitSpec half_of(UnitSpec block, const ModelConfig& model, bool attention) {
  const auto middle = block.params.begin() + static_cast<std::ptrdiff_t>(attention_params(block, model));
  attention ? block.params.erase(middle, block.params.end())
            : block.params.erase(block.params.begin(), middle);
  block.name += attention ? kAttentionHalf : kMlpHalf;
  return block;
}

void check_stages(const std::vector<StagePart>& parts, int64_t stages) {
  const auto count = static_cast<int64_t>(parts.size());
  if (stages >= 1 && stages <= count) return;
  throw ConfigError(
      "[plan.stages] there are {} stages, but the model has {} parts to distribute; use 1 to {} stages",
      stages, count, count);
}

/// The stem goes with the first block.
std::vector<StagePart> parts_of_images(const ModelFacts& facts) {
  std::vector<StagePart> parts;
  for (size_t unit = 1; unit < facts.units.size(); ++unit) {
    const UnitSpec& spec = facts.units[unit];
    parts.push_back({.name = spec.name, .flops = spec.image.flops, .params = spec.numel()});
  }
  parts.front().flops += facts.units.front().image.flops;
  parts.front().params += facts.units.front().numel();
  return parts;
}

bool is_attention(const StagePart& part) {
  return part.name.ends_with(kAttentionHalf);
}

/// The parameters of the norm before the head, which is in the first unit or the last; of images none.
std::vector<ParamSpec> final_norm_of(const ModelConfig& model, const ModelFacts& facts) {
  std::vector<ParamSpec> found;
  const auto final_norm = record_of(model.family).final_norm;
  if (final_norm == nullptr) return found;
  const std::vector<ParamSpec>& there =
      (model.tie_embeddings ? facts.units.front() : facts.units.back()).params;
  for (const ParamSpec& param : final_norm(model)) {
    const auto held = std::ranges::find(there, param.name, &ParamSpec::name);
    if (held != there.end()) found.push_back(*held);
  }
  return found;
}

/// A copy of the parameter for another stage, which neither saves nor counts it.
ParamSpec copy_of(ParamSpec param) {
  param.part.copy = 1;
  return param;
}

}  // namespace

PassWork& PassWork::operator+=(const PassWork& other) {
  forward += other.forward;
  backward_input += other.backward_input;
  backward_weight += other.backward_weight;
  return *this;
}

PassWork work_of(const StagePart& part) {
  // cuDNN's kernels beside products of a Llama's block, on an H200: causal, heads of 128, 4,096 tokens.
  constexpr double kForward = 1.3, kBackward = 3.9;
  if (part.name == kHeadUnit) return {.forward = 3.0 * part.flops - part.frozen};
  const double products = part.flops - part.attention;
  return {products + kForward * part.attention, products + kBackward * part.attention,
          products - part.frozen};
}

StageSplit cut_at(std::vector<int64_t> first, const std::vector<StagePart>& parts, double spread_flops) {
  StageSplit split{.of_halves = is_attention(parts.front()),
                   .first = std::move(first),
                   .flops = {},
                   .spread_flops = spread_flops};
  const auto stages = static_cast<double>(split.first.size() - 1);
  for (size_t stage = 0; stage + 1 < split.first.size(); ++stage) {
    double& flops = split.flops.emplace_back(spread_flops / stages);
    PassWork& work = split.work.emplace_back();
    for (int64_t part = split.first[stage]; part < split.first[stage + 1]; ++part) {
      flops += parts[static_cast<size_t>(part)].flops;
      work += work_of(parts[static_cast<size_t>(part)]);
    }
  }
  return split;
}

double head_flops(const ModelConfig& model) {
  return 2.0 * static_cast<double>(model.vocab_size) * static_cast<double>(model.d_model);
}

std::vector<StagePart> stage_parts(const ModelConfig& model, const ModelFacts& facts, bool spread_head,
                                   CutAt cut_at) {
  if (reads_images(model.family)) return parts_of_images(facts);
  const ModelFamilyRecord& family = record_of(model.family);
  const bool halves = cut_at == CutAt::kHalves && family.attention_params > 0;
  const auto layers = static_cast<double>(model.n_layers);
  const auto matmul = static_cast<double>(facts.matmul_params),
             frozen = static_cast<double>(facts.frozen_matmul_params);
  const double attention = ((facts.flops_per_token + 2.0 * frozen) / 3.0 - 2.0 * matmul) / layers;
  std::vector<StagePart> parts;
  for (int64_t layer = 0; layer < model.n_layers; ++layer) {
    const UnitSpec& unit = facts.units[static_cast<size_t>(1 + layer)];
    const auto add = [&](const UnitSpec& of, double attends) {
      parts.push_back({.name = of.name,
                       .flops = 2.0 * static_cast<double>(matrix_params(of.params)) + attends,
                       .params = of.numel(),
                       .attention = attends,
                       .frozen = 2.0 * static_cast<double>(matrix_params(of.frozen()))});
    };
    if (halves) {
      add(half_of(unit, model, true), attention);
      add(half_of(unit, model, false), 0.0);
    } else {
      add(unit, attention);
    }
  }
  parts.front().params += facts.units.front().numel();
  if (spread_head) return parts;
  const bool untied = facts.units.back().name == kHeadUnit;
  const bool is_frozen = (untied ? facts.units.back() : facts.units.front()).trained().empty();
  parts.push_back({.name = kHeadUnit,
                   .flops = head_flops(model),
                   .params = untied ? facts.units.back().numel() : model.vocab_size * model.d_model,
                   .frozen = is_frozen ? head_flops(model) : 0.0});
  return parts;
}

double StageSplit::all_work(size_t stage) const {
  return work[stage].all() + 3.0 * spread_flops / static_cast<double>(work.size());
}

std::vector<double> StageSplit::shares() const {
  std::vector<double> shares;
  double all = 0.0;
  for (size_t stage = 0; stage < flops.size(); ++stage) {
    shares.push_back(all_work(stage));
    all += shares.back();
  }
  for (double& share : shares) share = all > 0.0 ? share / all : 1.0 / static_cast<double>(shares.size());
  return shares;
}

namespace {

/// Numbers to be made small, the first one first: the work of the busiest rank, how unequal ranks are, the
/// largest stage.
std::tuple<double, double, double> unevenness(const CutWork& cut) {
  double squares = 0.0;
  for (const double of_rank : cut.of_ranks()) squares += of_rank * of_rank;
  return {std::ranges::max(cut.of_ranks()), squares, std::ranges::max(cut.of_stages())};
}

/// Moves cuts part by part, and two of them at once, as long as that helps the ranks.
std::vector<int64_t> balanced(CutWork cut) {
  auto least = unevenness(cut);
  const auto try_move = [&](const CutMove& one, const CutMove& other) {
    if (!cut.move(one, other)) return false;
    // Most moves load a rank beside them too much, which is seen without looking at all of them.
    if (cut.most_beside(one, other) <= std::get<0>(least)) {
      if (const auto now = unevenness(cut); now < least) {
        least = now;
        return true;
      }
    }
    cut.undo(one, other);
    return false;
  };
  for (bool better = true; better;) {
    better = false;
    for (size_t one = 1; one < cut.cuts(); ++one) {
      for (size_t other = one; other < cut.cuts(); ++other) {
        for (const auto& [by, also_by] : {std::pair(-1, 0), {1, 0}, {-1, -1}, {-1, 1}, {1, -1}, {1, 1}})
          better = try_move({one, by}, {other, other == one ? 0 : also_by}) || better;
      }
    }
  }
  return cut.first();
}

}  // namespace

StageSplit split_by_cost(const std::vector<StagePart>& parts, int64_t stages, double spread_flops,
                         const std::vector<int64_t>& ranks) {
  check_stages(parts, stages);
  const size_t count = parts.size(), wanted = static_cast<size_t>(stages);
  std::vector<double> before(count + 1, 0.0);  // work of the parts before this one
  for (size_t part = 0; part < count; ++part) before[part + 1] = before[part] + work_of(parts[part]).all();
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
  if (!ranks.empty()) first = balanced({parts, std::move(first), ranks, spread_flops});
  return cut_at(std::move(first), parts, spread_flops);
}

StageSplit split_by_blocks(const std::vector<StagePart>& parts, const std::vector<int64_t>& blocks,
                           double spread_flops) {
  const auto total = std::accumulate(blocks.begin(), blocks.end(), int64_t{0});
  const bool has_head = parts.back().name == kHeadUnit;
  const auto there = std::ssize(parts) - (has_head ? 1 : 0);
  if (total != there) {
    throw ConfigError(
        "[plan.stages] stages of {} blocks have {} in all, but the model has {}; distribute exactly those",
        fmt::join(blocks, ", "), total, there);
  }
  const auto must_have = blocks.end() - (has_head ? 1 : 0);
  const auto empty = std::find(blocks.begin(), must_have, 0);
  if (empty != must_have) {
    throw ConfigError("[plan.stages] stage {} of {} blocks would have nothing to do; give each at least 1{}",
                      empty - blocks.begin(), fmt::join(blocks, ", "),
                      has_head ? ", except the last, which has the head" : "");
  }
  std::vector<int64_t> first = {0};
  for (const int64_t count : blocks) first.push_back(first.back() + count);
  first.back() = std::ssize(parts);
  return cut_at(std::move(first), parts, spread_flops);
}

std::vector<int64_t> share_rows(int64_t vocab_size, int64_t ranks, int64_t width) {
  constexpr int64_t kAligned = 64, kBlock = FlatLayout::kAlignment;
  const int64_t least = kBlock / std::gcd(kBlock, width),
                unit = vocab_size / ranks >= 16 * kAligned ? kAligned : least;
  if (vocab_size / unit < ranks) {
    throw ConfigError(
        "[plan.stages] {} ranks cannot share a vocabulary of {} rows, {} or more each; lower parallel.pp, or "
        "set pipeline.spread_head=false",
        ranks, vocab_size, unit);
  }
  std::vector<int64_t> rows;
  for (int64_t rank = 0; rank < ranks; ++rank) rows.push_back(vocab_size / unit * rank / ranks * unit);
  rows.push_back(vocab_size);
  return rows;
}

/// A part of the split is a block, half a block, or the head.
UnitRange units_of_stage(const StageSplit& split, int64_t stage) {
  const auto at = static_cast<size_t>(stage);
  const bool spread = !split.vocabulary.empty();
  const auto unit_of = [&](int64_t part) { return 1 + (split.of_halves ? part / 2 : part); };
  if (const size_t stages = split.first.size() - 1; spread && at >= stages) {
    const int64_t head = unit_of(split.first.back() - 1) + 1;
    return {.first = head,
            .end = head + 1,
            .vocabulary = Range{split.vocabulary.at(at - stages), split.vocabulary.at(at - stages + 1)}};
  }
  const int64_t begin = split.first[at], end = split.first[at + 1];
  UnitRange range{.first = stage == 0 ? 0 : unit_of(begin), .end = unit_of(end - 1) + 1};
  if (spread && at + 2 == split.first.size()) {
    ++range.end;
    range.norm_alone = true;
  }
  if (!split.of_halves) return range;
  const bool ends_with_head = at + 2 == split.first.size() && end % 2 == 1;
  range.from_mlp = begin % 2 == 1;
  range.to_attention = end % 2 == 1 && !ends_with_head;
  return range;
}

std::vector<UnitSpec> stage_units(const ModelConfig& model, const ModelFacts& facts, UnitRange range) {
  const bool has_head = range.end == model.n_layers + 2, has_embeddings = range.first == 0;
  const std::vector<ParamSpec> norm = final_norm_of(model, facts);
  const auto is_of_norm = [&](const ParamSpec& param) {
    return std::ranges::find(norm, param.name, &ParamSpec::name) != norm.end();
  };
  const bool spread = range.norm_alone || range.vocabulary.has_value();
  UnitSpec root{kRootUnit, {}};
  if (has_embeddings)
    root = {.name = kRootUnit, .params = facts.units.front().params, .image = facts.units.front().image};
  if (model.tie_embeddings) {
    std::erase_if(root.params, is_of_norm);
    if (has_head && !spread) {
      if (!has_embeddings) root.params.push_back(copy_of(facts.units.front().params.front()));
      root.params.insert(root.params.end(), norm.begin(), norm.end());
    }
  }
  std::vector<UnitSpec> units = {std::move(root)};
  const int64_t count = std::min(range.end, std::ssize(facts.units));
  for (int64_t unit = std::max<int64_t>(1, range.first); unit < count; ++unit) {
    const UnitSpec& whole = facts.units[static_cast<size_t>(unit)];
    const bool mlp = range.from_mlp && unit == range.first,
               attention = range.to_attention && unit + 1 == count;
    units.push_back(mlp || attention ? half_of(whole, model, attention) : whole);
  }
  if (!spread) return units;
  if (model.tie_embeddings) units.push_back({kHeadUnit, {}});
  UnitSpec& head = units.back();
  const ParamSpec weight =
      model.tie_embeddings ? facts.units.front().params.front() : facts.units.back().params.back();
  head.params = range.norm_alone ? norm : std::vector<ParamSpec>{weight};
  if (range.vocabulary) {
    ParamSpec& held = head.params.front();
    held.part = part_of_rows(held.shape, *range.vocabulary);
    held.part.copy = model.tie_embeddings ? 1 : 0;
    held.shape.front() = range.vocabulary->size();
  }
  return units;
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
  return cut_at(std::move(first), parts, spread_flops);
}

}  // namespace trireme::plan
