// Every operation in every way that ranks can compute it, on small arrays: the parts together are what one
// rank computes alone, and so are gradients.
#include "trireme/plan/op_rules.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "tests/plan/dense_ops.h"
#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

using test::Dense;
using test::DenseCall;
using test::Index;
using OwnPart = test::Part;

constexpr auto kInt = TensorDtype::kInt64;
constexpr auto kBoolean = TensorDtype::kBool;

struct OpCase {
  Op op;
  std::vector<TensorType> types;
  OpAttributes attributes = {};
};

/// Sizes that ranks can share equally, and some that they cannot.
std::vector<OpCase> cases() {
  const TensorType a{{5, 4}}, row{{4}}, column{{5, 1}}, cube{{2, 4, 8}}, whole{{5, 4}, kInt};
  const TensorType heads{{2, 4, 3, 2}}, shared_heads{{2, 2, 3, 2}};
  std::vector<OpCase> all = {
      {Op::kFull, {}, OpAttributes::of({0}, {2.5}, {5, 4})},
      {Op::kRandn, {}, OpAttributes::of({0, 7}, {}, {5, 4})},
      {Op::kArange, {}, OpAttributes::of({5})},
      {Op::kWhere, {{{5, 4}, kBoolean}, a, row}},
      {Op::kCast, {a}, OpAttributes::of({1})},
      {Op::kScale, {a}, OpAttributes::of({}, {0.5})},
      {Op::kShift, {a}, OpAttributes::of({}, {0.5})},
      {Op::kDropout, {a}, OpAttributes::of({3}, {0.4})},
      {Op::kNeg, {whole}},
      {Op::kAdd, {whole, whole}},
      {Op::kSum, {whole}, OpAttributes::of({0}, {}, {0})},
      {Op::kTranspose, {cube}, OpAttributes::of({0, -1})},
      {Op::kReshape, {cube}, OpAttributes::of({}, {}, {8, 8})},
      {Op::kReshape, {cube}, OpAttributes::of({}, {}, {2, 4, 4, 2})},
      {Op::kReshape, {cube}, OpAttributes::of({}, {}, {-1})},
      {Op::kReshape, {a}, OpAttributes::of({}, {}, {1, 5, 2, 2})},
      {Op::kReshape, {{{4, 6}}}, OpAttributes::of({}, {}, {8, 3})},
      {Op::kUnsqueeze, {a}, OpAttributes::of({-1})},
      {Op::kSqueeze, {column}, OpAttributes::of({1})},
      {Op::kSlice, {a}, OpAttributes::of({1, 1, 3})},
      {Op::kSlice, {a}, OpAttributes::of({0, 0, 5})},
      {Op::kSplit, {{{3, 8}}}, OpAttributes::of({1}, {}, {2, 2, 4})},
      {Op::kCat, {a, {{5, 3}}, a}, OpAttributes::of({1})},
      {Op::kMatmul, {a, {{4, 3}}}},
      {Op::kMatmul, {{{2, 3, 4}}, {{4, 5}}}},
      {Op::kMatmul, {{{2, 1, 3, 4}}, {{5, 4, 2}}}},
      {Op::kLinear, {{{2, 3, 4}}, {{5, 4}}}},
      {Op::kLinear, {a, {{3, 4}}, {{3}}}},
      {Op::kEmbedding, {{{2, 3}, kInt}, {{5, 4}}}},
      {Op::kAttention, {heads, heads, heads}, OpAttributes::of({1}, {0.7})},
      {Op::kAttention, {heads, {{2, 4, 5, 2}}, {{2, 4, 5, 3}}}, OpAttributes::of({0}, {0.7})},
      {Op::kAttention, {heads, shared_heads, shared_heads}, OpAttributes::of({1}, {0.7})},
      {Op::kSoftmax, {cube}, OpAttributes::of({1})},
      {Op::kLogSoftmax, {a}, OpAttributes::of({-1})},
      {Op::kLayerNorm, {a, row, row}, OpAttributes::of({}, {1e-3})},
      {Op::kLayerNorm, {a}, OpAttributes::of({}, {1e-3})},
      {Op::kRmsNorm, {a, row}, OpAttributes::of({}, {1e-3})},
      {Op::kCrossEntropy, {a, {{5}, kInt}}},
      {Op::kMseLoss, {a, a}},
      {Op::kAddInto, {a, a}},
      {Op::kCopyInto, {a, a}},
      {Op::kSgd, {a, a}, OpAttributes::of({}, {0.1, 0.9, 0.01})},
      {Op::kSgd, {a, a, a}, OpAttributes::of({}, {0.1, 0.9, 0.01})},
      {Op::kAdamw, {a, a, a, a}, OpAttributes::of({3}, {0.1, 0.9, 0.95, 1e-8, 0.01})},
  };
  for (Op op = Op::kAdd; op <= Op::kGe; op = static_cast<Op>(static_cast<int>(op) + 1)) {
    all.push_back({op, {a, a}});
    all.push_back({op, {row, column}});
  }
  for (const Op op : {Op::kNeg, Op::kAbs, Op::kSquare, Op::kExp, Op::kLog, Op::kSqrt, Op::kRsqrt, Op::kTanh,
                      Op::kSigmoid, Op::kRelu, Op::kGelu, Op::kSilu})
    all.push_back({op, {a}});
  for (const Op op : {Op::kSum, Op::kMean, Op::kMax, Op::kMin}) {
    all.push_back({op, {cube}, OpAttributes::of({0}, {}, {1})});
    all.push_back({op, {cube}, OpAttributes::of({1}, {}, {0, -1})});
    all.push_back({op, {cube}});
  }
  return all;
}

std::string text_of(const OpCase& one) {
  std::string text(name(one.op));
  for (const TensorType& type : one.types) text += " " + to_text(type);
  return text;
}

std::string text_of(const OpStrategy& strategy) {
  std::string text;
  for (const TensorPlacement& placement : strategy.inputs) text += to_text(placement) + " ";
  text += "->";
  for (const TensorPlacement& placement : strategy.outputs) text += " " + to_text(placement);
  return text;
}

/// Values at which every operation is smooth; whole numbers are rows of tables with four or more.
Dense random_tensor(const TensorType& type, std::mt19937& random) {
  Dense tensor(type.shape);
  for (double& value : tensor.data) {
    value = std::uniform_real_distribution(0.2, 1.8)(random);
    if (type.dtype == kInt) value = static_cast<double>(random() % 4);
    if (type.dtype == kBoolean) value = static_cast<double>(random() % 2);
  }
  return tensor;
}

/// The results of a call, those that are written included.
size_t result_count(const OpCase& one, const FactorMap& map) {
  return record_of(one.op).in_place ? std::max<size_t>(1, one.types.size() - 1) : map.results.size();
}
/// The operands of a result that is an operand that is written: operands 0, 2, 3.
size_t written(size_t result) {
  return result == 0 ? 0 : result + 1;
}

/// What a rank has of a tensor: a part along a dimension, the whole, or a term of it.
OwnPart part_of(const Shape& shape, const TensorPlacement& placement, int64_t ranks, int64_t rank) {
  OwnPart part{Shape(shape.size(), 0), shape};
  if (placement.is_shard()) {
    const auto dim = static_cast<size_t>(placement.dim);
    part.begin[dim] = shard_range(shape[dim], ranks, rank).begin;
  }
  return part;
}

Shape held_shape(Shape shape, const TensorPlacement& placement, int64_t ranks, int64_t rank) {
  if (placement.is_shard()) {
    int64_t& size = shape[static_cast<size_t>(placement.dim)];
    size = shard_range(size, ranks, rank).size();
  }
  return shape;
}

/// Terms add up to the tensor and are no shares of it that a product with them could hide.
Dense held(const Dense& whole, const TensorPlacement& placement, int64_t ranks, int64_t rank) {
  const OwnPart part = part_of(whole.shape, placement, ranks, rank);
  Dense own(held_shape(whole.shape, placement, ranks, rank));
  test::for_each(own.shape, [&](const Index& index) {
    Index from = index;
    for (size_t dim = 0; dim < from.size(); ++dim) from[dim] += part.begin[dim];
    own[index] = whole[from];
    if (!placement.is_partial()) return;
    double others = 0;
    for (int64_t other = 0; other + 1 < ranks; ++other)
      others += std::sin(static_cast<double>(1 + other + 3 * static_cast<int64_t>(whole.place(from))));
    own[index] = rank + 1 < ranks
                     ? std::sin(static_cast<double>(1 + rank + 3 * static_cast<int64_t>(whole.place(from))))
                     : whole[from] - others;
  });
  return own;
}

/// Puts a rank's part of a result where it belongs, adds its term, or compares its copy.
void join_part(Dense& whole, const Dense& own, const TensorPlacement& placement, const OwnPart& part,
               int64_t rank, double tolerance) {
  test::for_each(own.shape, [&](const Index& index) {
    Index to = index;
    for (size_t dim = 0; dim < to.size(); ++dim) to[dim] += part.begin[dim];
    if (placement.is_partial()) {
      whole[to] += own[index];
    } else if (placement.is_replicate() && rank > 0) {
      EXPECT_NEAR(whole[to], own[index], tolerance);
    } else {
      whole[to] = own[index];
    }
  });
}

/// A case with values, computed by one rank or by several in one of their ways.
class Trial {
 public:
  explicit Trial(OpCase one)
      : case_(std::move(one)), map_(factor_map(case_.op, case_.types, case_.attributes)) {
    std::mt19937 random(11);
    for (const TensorType& type : case_.types) inputs_.push_back(random_tensor(type, random));
    for (size_t result = 0; result < result_count(case_, map_); ++result) {
      const Shape shape = record_of(case_.op).in_place ? case_.types[0].shape : map_.results[result].shape;
      result_shapes_.push_back(shape);
      weights_.push_back(random_tensor({shape}, random));
    }
    alone_ = {std::vector(inputs_.size(), TensorPlacement::replicate()),
              std::vector(map_.outputs.size(), TensorPlacement::replicate())};
  }

  const FactorMap& map() const { return map_; }
  std::vector<OpStrategy> ways(int64_t ranks) const { return strategies(map_, case_.types, ranks); }

  TensorPlacement result_placement(const OpStrategy& way, size_t result) const {
    return record_of(case_.op).in_place ? way.inputs[written(result)] : way.outputs[result];
  }

  std::vector<Dense> run_rank(const OpStrategy& way, std::vector<Dense> in, int64_t ranks,
                              int64_t rank) const {
    std::vector<OwnPart> parts, result_parts;
    for (size_t i = 0; i < in.size(); ++i)
      parts.push_back(part_of(inputs_[i].shape, way.inputs[i], ranks, rank));
    DenseCall call{case_.op, case_.attributes, in, parts, result_parts, {}};
    for (size_t result = 0; result < result_shapes_.size(); ++result) {
      const TensorPlacement placement = result_placement(way, result);
      result_parts.push_back(part_of(result_shapes_[result], placement, ranks, rank));
      call.out.emplace_back(held_shape(result_shapes_[result], placement, ranks, rank));
    }
    test::run(call);
    return call.out;
  }

  std::vector<Dense> held_inputs(const OpStrategy& way, int64_t ranks, int64_t rank) const {
    std::vector<Dense> own;
    for (size_t i = 0; i < inputs_.size(); ++i) own.push_back(held(inputs_[i], way.inputs[i], ranks, rank));
    return own;
  }

  std::vector<Dense> results(const OpStrategy& way, int64_t ranks) const {
    std::vector<Dense> whole(result_shapes_.begin(), result_shapes_.end());
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const std::vector<Dense> own = run_rank(way, held_inputs(way, ranks, rank), ranks, rank);
      for (size_t i = 0; i < whole.size(); ++i) {
        const TensorPlacement placement = result_placement(way, i);
        join_part(whole[i], own[i], placement, part_of(result_shapes_[i], placement, ranks, rank), rank,
                  1e-12);
      }
    }
    return whole;
  }
  std::vector<Dense> results_alone() const { return results(alone_, 1); }

  bool has_gradient(size_t input) const {
    if (record_of(case_.op).in_place || !is_floating(case_.types[input].dtype)) return false;
    return is_floating(map_.results[0].dtype);
  }

  /// The gradient of sum(weights * results) by operand `input`, by differences.
  Dense gradient(const OpStrategy& way, int64_t ranks, size_t input) const {
    constexpr double kStep = 1e-5;
    const TensorPlacement placement = gradient_of_input(way, input);
    Dense whole(inputs_[input].shape);
    for (int64_t rank = 0; rank < ranks; ++rank) {
      std::vector<Dense> in = held_inputs(way, ranks, rank);
      Dense own(in[input].shape);
      for (size_t i = 0; i < own.data.size(); ++i) {
        const double value = in[input].data[i];
        double sides[2];
        for (const int side : {0, 1}) {
          in[input].data[i] = value + (side == 0 ? -kStep : kStep);
          sides[side] = objective(way, run_rank(way, in, ranks, rank), ranks, rank);
        }
        in[input].data[i] = value;
        own.data[i] = (sides[1] - sides[0]) / (2 * kStep);
      }
      const TensorPlacement& lies = way.inputs[input];
      join_part(whole, own, placement, part_of(whole.shape, lies, ranks, rank), rank, 1e-6);
    }
    return whole;
  }
  Dense gradient_alone(size_t input) const { return gradient(alone_, 1, input); }

 private:
  double objective(const OpStrategy& way, const std::vector<Dense>& out, int64_t ranks, int64_t rank) const {
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const Dense own = held(weights_[i], gradient_of_output(way, i), ranks, rank);
      for (size_t at = 0; at < own.data.size(); ++at) sum += own.data[at] * out[i].data[at];
    }
    return sum;
  }

  OpCase case_;
  FactorMap map_;
  std::vector<Dense> inputs_, weights_;
  std::vector<Shape> result_shapes_;
  OpStrategy alone_;
};

void expect_near(const std::vector<Dense>& found, const std::vector<Dense>& wanted, double tolerance,
                 const std::string& what) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) {
    for (size_t at = 0; at < found[i].data.size(); ++at)
      ASSERT_NEAR(found[i].data[at], wanted[i].data[at], tolerance) << what << ", result " << i;
  }
}

TEST(OpRules, EveryOperationHasACase) {
  std::set<Op> found;
  for (const OpCase& one : cases()) found.insert(one.op);
  EXPECT_EQ(found.size(), kNames<Op>.size());
}

TEST(OpRules, MapsHaveAFactorForEachDimensionOfEachOperandAndResult) {
  for (const OpCase& one : cases()) {
    const FactorMap map = factor_map(one.op, one.types, one.attributes);
    ASSERT_EQ(map.inputs.size(), one.types.size()) << text_of(one);
    ASSERT_EQ(map.outputs.size(), map.results.size()) << text_of(one);
    for (size_t i = 0; i < one.types.size(); ++i)
      EXPECT_EQ(map.inputs[i].size(), one.types[i].shape.size()) << text_of(one) << ", operand " << i;
    for (size_t i = 0; i < map.results.size(); ++i)
      EXPECT_EQ(map.outputs[i].size(), map.results[i].shape.size()) << text_of(one) << ", result " << i;
    EXPECT_EQ(record_of(one.op).in_place, map.results.empty()) << text_of(one);
  }
}

TEST(OpRules, PartsTogetherAreWhatOneRankComputes) {
  for (const OpCase& one : cases()) {
    const Trial trial(one);
    const std::vector<Dense> wanted = trial.results_alone();
    for (const int64_t ranks : {2, 3, 4}) {
      for (const OpStrategy& way : trial.ways(ranks))
        expect_near(trial.results(way, ranks), wanted, 1e-9,
                    fmt::format("{} on {}: {}", text_of(one), ranks, text_of(way)));
    }
  }
}

TEST(OpRules, GradientsArePlacedByTheTransposedMap) {
  for (const OpCase& one : cases()) {
    const Trial trial(one);
    for (size_t input = 0; input < one.types.size(); ++input) {
      if (!trial.has_gradient(input)) continue;
      const Dense wanted = trial.gradient_alone(input);
      for (const int64_t ranks : {2, 4}) {
        for (const OpStrategy& way : trial.ways(ranks))
          expect_near({trial.gradient(way, ranks, input)}, {wanted}, 2e-6,
                      fmt::format("{} on {}: {}, operand {}", text_of(one), ranks, text_of(way), input));
      }
    }
  }
}

/// All placements of a tensor: whole, a sum where it may be one, and split along each dimension.
std::vector<TensorPlacement> layouts(const TensorType& type) {
  std::vector<TensorPlacement> all = {TensorPlacement::replicate()};
  if (is_floating(type.dtype)) all.push_back(TensorPlacement::partial());
  for (int64_t dim = 0; dim < std::ssize(type.shape); ++dim) all.push_back(TensorPlacement::shard(dim));
  return all;
}

/// Calls body with every combination of layouts of the operands.
void for_all_layouts(const std::vector<TensorType>& types, std::vector<TensorPlacement> chosen,
                     const std::function<void(const std::vector<TensorPlacement>&)>& body) {
  if (chosen.size() == types.size()) return body(chosen);
  for (const TensorPlacement& placement : layouts(types[chosen.size()])) {
    std::vector<TensorPlacement> next = chosen;
    next.push_back(placement);
    for_all_layouts(types, next, body);
  }
}

TEST(OpRules, FromEveryLayoutTheCheapestWayIsTaken) {
  for (const OpCase& one : cases()) {
    if (record_of(one.op).in_place || one.types.size() > 3) continue;
    const FactorMap map = factor_map(one.op, one.types, one.attributes);
    for_all_layouts(one.types, {}, [&](const std::vector<TensorPlacement>& placements) {
      OpRequest request{.op = one.op, .attributes = one.attributes, .types = one.types};
      request.placements = placements;
      request.ranks = 2;
      const OpPlan plan = plan_op(request);
      const auto cost = [&](const OpStrategy& way, bool weights) {
        int64_t bytes = 0;
        for (size_t i = 0; i < placements.size(); ++i) {
          const bool stays = std::ranges::count(map.stay, static_cast<int64_t>(i)) > 0;
          if (stays || !weights)
            bytes += redistribute_bytes(placements[i], way.inputs[i], one.types[i].shape,
                                        bytes_of(one.types[i].dtype), 2);
        }
        return bytes;
      };
      EXPECT_EQ(plan.bytes(), cost(plan.strategy, false));
      for (const OpStrategy& way : strategies(map, one.types, 2)) {
        const bool makes_whole_terms = std::ranges::any_of(way.outputs, &TensorPlacement::is_partial) &&
                                       !is_floating(map.results[0].dtype);
        const bool moves_fewer_weights = cost(plan.strategy, true) == 0 || map.stay.empty();
        if (makes_whole_terms || !moves_fewer_weights || (cost(way, true) > 0 && !map.stay.empty())) continue;
        EXPECT_LE(plan.bytes(), cost(way, false)) << text_of(one) << ": " << text_of(way);
      }
      request.is_explicit = true;
      if (plan.bytes() == 0) {
        EXPECT_NO_THROW(plan_op(request)) << text_of(one);
      } else {
        EXPECT_THROW(plan_op(request), ConfigError) << text_of(one);
      }
    });
  }
}

OpRequest matmul(const TensorPlacement& x, const TensorPlacement& weight) {
  return {.op = Op::kMatmul,
          .types = {{{8, 16}}, {{16, 32}}},
          .placements = {x, weight},
          .ranks = 2,
          .where = "p.txt:4"};
}

/// Column- and row-parallel products of tensor parallelism, which nobody has to spell out.
TEST(OpRules, ProductsAreColumnAndRowParallelByTheirWeights) {
  const auto replicate = TensorPlacement::replicate(), rows = TensorPlacement::shard(0),
             columns = TensorPlacement::shard(1), partial = TensorPlacement::partial();
  const OpPlan column = plan_op(matmul(replicate, columns));
  EXPECT_EQ(column.results().front(), columns);
  EXPECT_EQ(column.bytes(), 0);
  const OpPlan row = plan_op(matmul(columns, rows));
  EXPECT_EQ(row.results().front(), partial);
  EXPECT_EQ(row.bytes(), 0);
  // Split rows are gathered before a column-parallel product; the weight stays.
  const OpPlan gathered = plan_op(matmul(rows, columns));
  ASSERT_EQ(gathered.moves.size(), 1u);
  EXPECT_EQ(gathered.moves[0].tensor, 0);
  EXPECT_EQ(gathered.moves[0].to, replicate);
  EXPECT_EQ(gathered.bytes(), 8 * 16 * 4 / 2);
  // A result that is asked for is one more move.
  OpRequest request = matmul(columns, rows);
  request.result = rows;
  const OpPlan scattered = plan_op(request);
  EXPECT_EQ(scattered.results().front(), rows);
  EXPECT_TRUE(scattered.moves.back().is_result);
  EXPECT_EQ(scattered.bytes(), 8 * 32 * 4 / 2);
}

std::string refusal(const OpRequest& request) {
  try {
    plan_op(request);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return {};
}

TEST(OpRules, ExplicitModeNamesWhatWouldMove) {
  OpRequest request = matmul(TensorPlacement::shard(0), TensorPlacement::shard(1));
  request.is_explicit = true;
  const std::string said = refusal(request);
  for (const char* word :
       {"p.txt:4: matmul", "operand 0, fp32 (8, 16)", "from S(0) to R", "256 bytes", "have the operand in R"})
    EXPECT_TRUE(said.find(word) != std::string::npos) << said;
  request.placements[0] = TensorPlacement::replicate();
  EXPECT_EQ(refusal(request), "");
}

TEST(OpRules, WhatIsPinnedStays) {
  OpRequest request = matmul(TensorPlacement::shard(0), TensorPlacement::shard(1));
  request.pinned = {true, false};
  EXPECT_EQ(plan_op(request).moves.front().tensor, 1);
  request.pinned = {true, true};
  EXPECT_TRUE(refusal(request).find("operand 0 S(0) and operand 1 S(1)") != std::string::npos)
      << refusal(request);
  request.ranks = 1;
  EXPECT_EQ(refusal(request), "") << "alone, a rank has the whole of both";
  // A parameter that is written stays, and its gradient comes to it.
  const TensorType type{{8, 4}};
  OpRequest sgd{.op = Op::kSgd,
                .types = {type, type},
                .placements = {TensorPlacement::shard(1), TensorPlacement::partial()}};
  sgd.ranks = 2;
  const OpPlan plan = plan_op(sgd);
  ASSERT_EQ(plan.moves.size(), 1u);
  EXPECT_EQ(plan.moves[0].to, TensorPlacement::shard(1));
  sgd.placements[0] = TensorPlacement::partial();
  EXPECT_TRUE(refusal(sgd).find("cannot have operand 0 P") != std::string::npos) << refusal(sgd);
}

TEST(OpRules, TypesThatDoNotFitAreRefused) {
  const TensorType a{{5, 4}}, whole{{5}, kInt}, half{{5, 4}, TensorDtype::kBf16};
  const std::pair<OpCase, const char*> refused[] = {
      {{Op::kAdd, {a}}, "add has 1 operands; it takes 2"},
      {{Op::kLinear, {a}}, "it takes 2 to 3"},
      {{Op::kAdd, {a, half}}, "must have one dtype"},
      {{Op::kAdd, {a, {{3}}}}, "shapes must be equal, or 1"},
      {{Op::kDiv, {whole, whole}}, "floating dtype"},
      {{Op::kExp, {whole}}, "floating dtype"},
      {{Op::kNeg, {{{5}, kBoolean}}}, "bool has no arithmetic"},
      {{Op::kWhere, {a, a, a}}, "must be bool"},
      {{Op::kCast, {a}, OpAttributes::of({9})}, "no dtype 9"},
      {{Op::kMatmul, {a, {{5, 4}}}}, "the first has 4 columns, the second 5 rows"},
      {{Op::kMatmul, {a, {{4}}}}, "two dimensions or more"},
      {{Op::kLinear, {a, {{3, 5}}}}, "do not fit a weight of 5 columns"},
      {{Op::kLinear, {a, {{3, 4}}, {{4}}}}, "the bias must be (3)"},
      {{Op::kEmbedding, {a, a}}, "must be int64"},
      {{Op::kEmbedding, {whole, {{4}}}}, "the table needs two dimensions"},
      {{Op::kAttention, {a, a, a}}, "(batch, heads, tokens, width)"},
      {{Op::kAttention, {{{1, 3, 2, 2}}, {{1, 2, 2, 2}}, {{1, 2, 2, 2}}}}, "3 heads cannot share 2"},
      {{Op::kAttention, {{{1, 2, 2, 2}}, {{1, 2, 3, 2}}, {{1, 2, 3, 2}}}, OpAttributes::of({1})},
       "as many keys as queries"},
      {{Op::kSoftmax, {a}, OpAttributes::of({2})}, "dimension 2 is outside 2"},
      {{Op::kSum, {a}, OpAttributes::of({0}, {}, {0, -2})}, "named twice"},
      {{Op::kMax, {{{0, 4}}}, OpAttributes::of({0}, {}, {0})}, "nothing along dimension 0"},
      {{Op::kReshape, {a}, OpAttributes::of({}, {}, {3, 7})}, "other than 20 elements"},
      {{Op::kReshape, {a}, OpAttributes::of({}, {}, {-1, 7})}, "no place for 20 elements"},
      {{Op::kSqueeze, {a}, OpAttributes::of({0})}, "has not the size 1"},
      {{Op::kSlice, {a}, OpAttributes::of({1, 2, 5})}, "2 to 5 is outside a dimension of 4"},
      {{Op::kSplit, {a}, OpAttributes::of({0}, {}, {2, 2})}, "add up to 4, not to 5"},
      {{Op::kCat, {a, {{4, 4}}}, OpAttributes::of({1})}, "differ in dimension 0"},
      {{Op::kLayerNorm, {a, {{5}}}}, "operand 1 must be (4)"},
      {{Op::kCrossEntropy, {a, {{4}, kInt}}}, "targets (rows)"},
      {{Op::kMseLoss, {a, {{4, 5}}}}, "shapes must be equal"},
      {{Op::kSgd, {a, {{5}}}}, "shapes must be equal"},
      {{Op::kFull, {}, OpAttributes::of({0}, {}, {4, -1})}, "negative dimension"},
      {{Op::kFull, {}, OpAttributes::of({0}, {}, {0, int64_t{1} << 50})}, "too large"},
      {{Op::kAdd, {{{int64_t{1} << 40, 1}}, {{1, int64_t{1} << 40}}}}, "too large"},
  };
  for (const auto& [one, said] : refused) {
    std::string message;
    try {
      factor_map(one.op, one.types, one.attributes);
    } catch (const ConfigError& error) {
      message = error.what();
    }
    EXPECT_TRUE(message.find(said) != std::string::npos) << text_of(one) << ": " << message;
  }
  OpRequest request = matmul(TensorPlacement::shard(2), TensorPlacement::replicate());
  EXPECT_TRUE(refusal(request).find("no dimension 2") != std::string::npos) << refusal(request);
  OpRequest terms{.op = Op::kNeg, .types = {whole}, .placements = {TensorPlacement::partial()}};
  EXPECT_TRUE(refusal(terms).find("cannot be a sum over ranks") != std::string::npos) << refusal(terms);
}

}  // namespace
}  // namespace trireme::plan
