#include "trireme/plan/op_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::plan {
namespace {

constexpr TensorPlacement kReplicated = TensorPlacement::replicate(), kTerms = TensorPlacement::partial();

bool is_among(const std::vector<int64_t>& numbers, int64_t number) {
  return std::ranges::find(numbers, number) != numbers.end();
}

std::optional<size_t> dim_with(const std::vector<int64_t>& dims, int64_t factor) {
  const auto found = std::ranges::find(dims, factor);
  return found == dims.end() ? std::nullopt : std::optional<size_t>(found - dims.begin());
}

/// Whether a dimension has the factor, which is not so where all of them must be whole, and all dimensions
/// that have it can be shared out so that ranks have what belongs together.
bool can_share(const FactorMap& map, const std::vector<TensorType>& inputs, int64_t factor, int64_t ranks) {
  const auto has_factor = [factor](const std::vector<int64_t>& dims) { return is_among(dims, factor); };
  if (std::ranges::none_of(map.inputs, has_factor) && std::ranges::none_of(map.outputs, has_factor))
    return false;
  if (!is_among(map.even, factor)) return true;
  const auto divides = [&](const std::vector<int64_t>& dims, const Shape& shape) {
    const std::optional<size_t> dim = dim_with(dims, factor);
    return !dim || shape[*dim] % ranks == 0;
  };
  for (size_t i = 0; i < inputs.size(); ++i)
    if (!divides(map.inputs[i], inputs[i].shape)) return false;
  for (size_t i = 0; i < map.results.size(); ++i)
    if (!divides(map.outputs[i], map.results[i].shape)) return false;
  return true;
}

OpStrategy shared(const FactorMap& map, int64_t factor) {
  const bool sums = std::ranges::none_of(
      map.outputs, [factor](const std::vector<int64_t>& dims) { return is_among(dims, factor); });
  OpStrategy strategy;
  for (size_t i = 0; i < map.inputs.size(); ++i) {
    const std::optional<size_t> dim = dim_with(map.inputs[i], factor);
    const bool is_added = sums && is_among(map.added, static_cast<int64_t>(i));
    strategy.inputs.push_back(dim        ? TensorPlacement::shard(static_cast<int64_t>(*dim))
                              : is_added ? kTerms
                                         : kReplicated);
  }
  for (const std::vector<int64_t>& dims : map.outputs) {
    const std::optional<size_t> dim = dim_with(dims, factor);
    strategy.outputs.push_back(dim ? TensorPlacement::shard(static_cast<int64_t>(*dim)) : kTerms);
  }
  return strategy;
}

OpStrategy replicated(const FactorMap& map) {
  return {std::vector(map.inputs.size(), kReplicated), std::vector(map.outputs.size(), kReplicated)};
}

std::string placements_text(const std::vector<TensorPlacement>& placements) {
  std::vector<std::string> words;
  for (const TensorPlacement& placement : placements) words.push_back(to_text(placement));
  return join(words, ", ");
}

/// How much a strategy is against what was asked for, the most important first.
using Against = std::tuple<int64_t, int64_t, int64_t, int64_t>;

class Planner {
 public:
  explicit Planner(const OpRequest& request)
      : request_(request), map_(factor_map(request.op, request.types, request.attributes)) {
    check();
  }

  OpPlan plan() {
    std::optional<OpPlan> best;
    std::optional<Against> least;
    for (const OpStrategy& strategy : strategies(map_, request_.types, request_.ranks)) {
      if (!is_possible(strategy)) continue;
      OpPlan next{.map = map_, .strategy = strategy, .moves = moves_for(strategy)};
      const Against against = against_of(next);
      if (least && *least <= against) continue;
      best = std::move(next);
      least = against;
    }
    if (!best) throw_pinned();
    if (request_.is_explicit) check_explicit(*best);
    return std::move(*best);
  }

 private:
  void check() const {
    const size_t operands = request_.types.size();
    TRIREME_CHECK(request_.placements.size() == operands && request_.ranks >= 1 &&
                      (request_.pinned.empty() || request_.pinned.size() == operands),
                  "[plan.ops] {} operands, {} placements, {} pins on {} ranks", operands,
                  request_.placements.size(), request_.pinned.size(), request_.ranks);
    for (size_t i = 0; i < operands; ++i) check_placement(request_.placements[i], request_.types[i]);
    if (request_.result) {
      for (const TensorType& type : map_.results) check_placement(*request_.result, type);
    }
  }

  void check_placement(const TensorPlacement& placement, const TensorType& type) const {
    if (placement.is_shard() && placement.dim >= std::ssize(type.shape)) {
      throw ConfigError("[plan.ops] {}{}: a tensor {} has no dimension {} to be split along", at(),
                        request_.op, to_text(type), placement.dim);
    }
    if (placement.is_partial() && !is_floating(type.dtype)) {
      throw ConfigError("[plan.ops] {}{}: a tensor {} cannot be a sum over ranks; only floating ones are",
                        at(), request_.op, to_text(type));
    }
  }

  std::string at() const { return request_.where.empty() ? "" : request_.where + ": "; }

  /// An operand that is written stays where it is; so does what the user has pinned.
  bool is_pinned(size_t input) const {
    return (!request_.pinned.empty() && request_.pinned[input]) ||
           (record_of(request_.op).in_place && input != 1);
  }

  bool is_possible(const OpStrategy& strategy) const {
    for (size_t i = 0; i < strategy.inputs.size(); ++i) {
      // Alone, a rank has the whole of everything, whatever its placement.
      const bool stays = request_.ranks == 1 || strategy.inputs[i] == request_.placements[i];
      if (is_pinned(i) && !stays) return false;
      // Terms of whole numbers do not travel, and nothing makes them.
      if (strategy.inputs[i].is_partial() && !is_floating(request_.types[i].dtype)) return false;
    }
    for (size_t i = 0; i < strategy.outputs.size(); ++i) {
      if (strategy.outputs[i].is_partial() && !is_floating(map_.results[i].dtype)) return false;
    }
    return true;
  }

  int64_t bytes_between(const TensorPlacement& from, const TensorPlacement& to,
                        const TensorType& type) const {
    return redistribute_bytes(from, to, type.shape, bytes_of(type.dtype), request_.ranks);
  }

  std::vector<OpMove> moves_for(const OpStrategy& strategy) const {
    std::vector<OpMove> moves;
    const auto add = [&](size_t tensor, bool is_result, const TensorPlacement& from,
                         const TensorPlacement& to, const TensorType& type) {
      if (from != to)
        moves.push_back({static_cast<int64_t>(tensor), is_result, from, to, bytes_between(from, to, type)});
    };
    for (size_t i = 0; i < strategy.inputs.size(); ++i)
      add(i, false, request_.placements[i], strategy.inputs[i], request_.types[i]);
    for (size_t i = 0; i < strategy.outputs.size() && request_.result; ++i)
      add(i, true, strategy.outputs[i], *request_.result, map_.results[i]);
    return moves;
  }

  Against against_of(const OpPlan& plan) const {
    int64_t weights_moved = 0;
    for (const OpMove& move : plan.moves) {
      if (!move.is_result && move.bytes > 0 && is_among(map_.stay, move.tensor)) ++weights_moved;
    }
    const int64_t terms = std::ranges::count_if(plan.strategy.outputs, &TensorPlacement::is_partial);
    return {weights_moved, plan.bytes(), std::ssize(plan.moves), terms};
  }

  [[noreturn]] void throw_pinned() const {
    std::vector<std::string> pinned;
    for (size_t i = 0; i < request_.types.size(); ++i)
      if (is_pinned(i)) pinned.push_back(fmt::format("operand {} {}", i, to_text(request_.placements[i])));
    throw ConfigError(
        "[plan.ops] {}{} cannot have {} where they are ({}) on {} ranks; let one move, or place it otherwise",
        at(), request_.op, join(pinned, " and "), placements_text(request_.placements), request_.ranks);
  }

  void check_explicit(const OpPlan& plan) const {
    for (const OpMove& move : plan.moves) {
      if (move.bytes == 0) continue;
      const TensorType& type = move.is_result ? map_.results[static_cast<size_t>(move.tensor)]
                                              : request_.types[static_cast<size_t>(move.tensor)];
      throw ConfigError(
          "[plan.ops] {}{} of operands {} would move {} {}, {}, from {} to {} without being told: {} bytes "
          "of each of {} ranks; {} {}, or leave explicit mode",
          at(), request_.op, placements_text(request_.placements), move.is_result ? "result" : "operand",
          move.tensor, to_text(type), to_text(move.from), to_text(move.to), move.bytes, request_.ranks,
          move.is_result ? "ask for the result in" : "have the operand in",
          to_text(move.is_result ? move.from : move.to));
    }
  }

  const OpRequest& request_;
  FactorMap map_;
};

}  // namespace

std::vector<OpStrategy> strategies(const FactorMap& map, const std::vector<TensorType>& inputs,
                                   int64_t ranks) {
  std::vector<OpStrategy> all = {replicated(map)};
  for (int64_t factor = 0; factor < map.factors; ++factor) {
    if (can_share(map, inputs, factor, ranks)) all.push_back(shared(map, factor));
  }
  for (const std::vector<int64_t>& operands : map.linear) {
    OpStrategy strategy{replicated(map).inputs, std::vector(map.outputs.size(), kTerms)};
    for (const int64_t operand : operands) strategy.inputs[static_cast<size_t>(operand)] = kTerms;
    all.push_back(strategy);
  }
  return all;
}

TensorPlacement gradient_of_input(const OpStrategy& strategy, size_t input) {
  const TensorPlacement& placement = strategy.inputs[input];
  if (placement.is_shard()) return placement;
  if (placement.is_partial()) return kReplicated;
  const auto is_whole = [](const TensorPlacement& one) { return one.is_replicate(); };
  const bool divided =
      !std::ranges::all_of(strategy.inputs, is_whole) || !std::ranges::all_of(strategy.outputs, is_whole);
  return divided ? kTerms : kReplicated;
}

TensorPlacement gradient_of_output(const OpStrategy& strategy, size_t output) {
  const TensorPlacement& placement = strategy.outputs[output];
  return placement.is_shard() ? placement : kReplicated;
}

std::vector<TensorPlacement> OpPlan::results() const {
  std::vector<TensorPlacement> placements = strategy.outputs;
  for (const OpMove& move : moves) {
    if (move.is_result) placements[static_cast<size_t>(move.tensor)] = move.to;
  }
  return placements;
}

int64_t OpPlan::bytes() const {
  int64_t bytes = 0;
  for (const OpMove& move : moves) bytes += move.bytes;
  return bytes;
}

OpPlan plan_op(const OpRequest& request) {
  return Planner(request).plan();
}

}  // namespace trireme::plan
