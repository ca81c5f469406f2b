// Every operation, from all layouts of its operands and in every way that ranks can compute it, against dense
// computations by torch: values, gradients and bytes. Ranks are threads.
#include "trireme/tensor/op_kernels.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <functional>
#include <set>

#include "tests/support/refusal.h"
#include "tests/tensor/op_cases.h"
#include "tests/tensor/parts.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::Group;
using comm::World;
using plan::Op;
using plan::OpPlan;
using plan::OpStrategy;
using plan::Shape;
using plan::TensorPlacement;
using plan::TensorType;
using test::expect_refusal;
using test::group_of_all;
using test::kFlag;
using test::kHalfWidth;
using test::kInt;
using test::OpCase;
using test::part_of;
using test::run_ranks;
using Tensors = std::vector<at::Tensor>;

bool writes(const OpCase& one) {
  return plan::record_of(one.op).in_place;
}

/// Smooth and far from zero; positive where an operation takes only that. Whole numbers are classes of four.
at::Tensor values_of(const OpCase& one, size_t operand) {
  const TensorType& type = one.types[operand];
  if (type.dtype == kInt) return at::randint(4, type.shape, at::kLong);
  if (type.dtype == kFlag) return at::randint(2, type.shape, at::kLong).to(at::kBool);
  const at::Tensor sizes = at::rand(type.shape) * 1.6 + 0.2;
  const bool positive =
      (one.op >= Op::kLog && one.op <= Op::kRsqrt) || (one.op == Op::kAdamw && operand == 3);
  const at::Tensor values = positive ? sizes : at::where(at::rand(type.shape) < 0.5, -sizes, sizes);
  return values.to(tensor::scalar_type_of(type.dtype)).to(at::kFloat);
}

/// A case on whole tensors, in fp32 whatever its dtypes are.
struct WholeCase {
  OpCase one;
  plan::FactorMap map;
  Tensors inputs, weights, results, gradients;  ///< gradients are undefined where there are none

  explicit WholeCase(OpCase which)
      : one(std::move(which)), map(factor_map(one.op, one.types, one.attributes)) {
    for (size_t i = 0; i < one.types.size(); ++i) {
      inputs.push_back(values_of(one, i));
      if (has_gradient(i)) inputs.back().requires_grad_();
    }
    results = test::dense(one, inputs);
    for (const at::Tensor& result : results) weights.push_back(at::rand(result.sizes()) + 0.5);
    differentiate();
    for (at::Tensor& result : results) result = result.detach();
    for (at::Tensor& input : inputs) input = input.detach();
  }

  bool has_gradient(size_t input) const {
    return !writes(one) && is_floating(one.types[input].dtype) && is_floating(map.results[0].dtype);
  }
  /// Results, or the operands that are written.
  std::vector<TensorType> result_types() const {
    if (!writes(one)) return map.results;
    std::vector<TensorType> types = {one.types[0]};
    types.insert(types.end(), one.types.begin() + std::min<ptrdiff_t>(2, std::ssize(one.types)),
                 one.types.end());
    return types;
  }
  bool is_rough() const {
    return std::ranges::any_of(one.types, [](const TensorType& type) { return type.dtype == kHalfWidth; }) ||
           (!map.results.empty() && map.results[0].dtype == kHalfWidth);
  }

 private:
  void differentiate() {
    gradients.resize(inputs.size());
    at::Tensor objective = at::zeros({});
    for (size_t i = 0; i < results.size(); ++i) objective = objective + (weights[i] * results[i]).sum();
    if (!objective.requires_grad()) return;
    objective.backward();
    for (size_t i = 0; i < inputs.size(); ++i) gradients[i] = inputs[i].grad();
  }
};

const std::vector<WholeCase>& whole_cases() {
  static const std::vector<WholeCase> all = [] {
    at::manual_seed(11);
    std::vector<WholeCase> made;
    for (const auto& some :
         {test::moving_cases(), test::element_cases(), test::layer_cases(), test::update_cases()})
      for (const OpCase& one : some) made.emplace_back(one);
    return made;
  }();
  return all;
}

/// One way of one case: where operands lie before, and the plan.
struct OpTrial {
  const WholeCase& whole;
  std::vector<TensorPlacement> placements;
  OpPlan plan;

  std::string text(int64_t ranks) const {
    std::vector<std::string> before, ways, after;
    for (const TensorPlacement& placement : placements) before.push_back(plan::to_text(placement));
    for (const TensorPlacement& placement : plan.strategy.inputs) ways.push_back(plan::to_text(placement));
    for (const TensorPlacement& placement : plan.results()) after.push_back(plan::to_text(placement));
    std::vector<std::string> types;
    for (const TensorType& type : whole.one.types) types.push_back(plan::to_text(type));
    return fmt::format("{} of {} on {}: {} as {} to {}", whole.one.op, fmt::join(types, ", "), ranks,
                       fmt::join(before, " "), fmt::join(ways, " "), fmt::join(after, " "));
  }
  std::vector<TensorPlacement> result_placements() const {
    if (!writes(whole.one)) return plan.results();
    std::vector<TensorPlacement> written = {placements[0]};
    for (size_t i = 2; i < placements.size(); ++i) written.push_back(placements[i]);
    return written;
  }
};

bool makes_terms_of_whole_numbers(const WholeCase& whole, const OpStrategy& way) {
  for (size_t i = 0; i < way.inputs.size(); ++i)
    if (way.inputs[i].is_partial() && !is_floating(whole.one.types[i].dtype)) return true;
  for (size_t i = 0; i < way.outputs.size(); ++i)
    if (way.outputs[i].is_partial() && !is_floating(whole.map.results[i].dtype)) return true;
  return false;
}

std::vector<TensorPlacement> layouts_of(const TensorType& type) {
  std::vector<TensorPlacement> all = {TensorPlacement::replicate()};
  if (is_floating(type.dtype)) all.push_back(TensorPlacement::partial());
  for (int64_t dim = 0; dim < std::ssize(type.shape); ++dim) all.push_back(TensorPlacement::shard(dim));
  return all;
}

void for_all_layouts_of(const std::vector<TensorType>& types, std::vector<TensorPlacement> chosen,
                        const std::function<void(const std::vector<TensorPlacement>&)>& body) {
  if (chosen.size() == types.size()) return body(chosen);
  for (const TensorPlacement& placement : layouts_of(types[chosen.size()])) {
    chosen.push_back(placement);
    for_all_layouts_of(types, chosen, body);
    chosen.pop_back();
  }
}

/// Ways from these layouts: to results as they come, and, with one operand or none, to every layout.
void add_planned(std::vector<OpTrial>& all, const WholeCase& whole,
                 const std::vector<TensorPlacement>& placements, int64_t ranks) {
  plan::OpRequest request{.op = whole.one.op, .attributes = whole.one.attributes, .types = whole.one.types};
  request.placements = placements;
  request.ranks = ranks;
  const bool stays_together = !writes(whole.one) || std::ranges::all_of(placements, [&](const auto& one) {
    return one == placements[0] || &one == &placements[1];
  });
  const bool updates_terms =
      writes(whole.one) && placements[0].is_partial() && ranks > 1 && whole.one.op >= Op::kSgd;
  if (!stays_together || updates_terms) return;
  all.push_back({whole, placements, plan_op(request)});
  if (placements.size() > 1 || writes(whole.one)) return;
  for (const TensorPlacement& result : layouts_of(whole.map.results.front())) {
    request.result = result;
    all.push_back({whole, placements, plan_op(request)});
  }
}

std::vector<OpTrial> all_trials(int64_t ranks) {
  std::vector<OpTrial> all;
  for (const WholeCase& whole : whole_cases()) {
    for (const OpStrategy& way : strategies(whole.map, whole.one.types, ranks)) {
      if (makes_terms_of_whole_numbers(whole, way)) continue;
      all.push_back({whole, way.inputs, {.map = whole.map, .strategy = way, .moves = {}}});
    }
    for_all_layouts_of(whole.one.types, {}, [&](const std::vector<TensorPlacement>& placements) {
      add_planned(all, whole, placements, ranks);
    });
  }
  return all;
}

/// Results and gradients that a rank has after a trial, and bytes that it sent.
struct OpOutcome {
  Tensors results, gradients;
  int64_t bytes = 0, bytes_back = 0;
};

int64_t bytes_so_far(const Group& group) {
  int64_t sum = 0;
  for (const auto& [kind, traffic] : group.traffic()) sum += traffic.bytes;
  return sum;
}

Tensors parts_here(const OpTrial& trial, const Group& group) {
  Tensors parts;
  for (size_t i = 0; i < trial.placements.size(); ++i) {
    const auto dtype = tensor::scalar_type_of(trial.whole.one.types[i].dtype);
    parts.push_back(
        part_of(trial.whole.inputs[i].to(dtype), trial.placements[i], group.rank(), group.size()));
    if (trial.whole.has_gradient(i)) parts.back().requires_grad_();
  }
  return parts;
}

void go_back(const OpTrial& trial, const Tensors& results, const Group& group) {
  Tensors roots, gradients;
  const std::vector<TensorPlacement> placements = trial.plan.results();
  for (size_t i = 0; i < results.size(); ++i) {
    if (!results[i].requires_grad()) continue;
    const at::Tensor weights = trial.whole.weights[i].to(results[i].scalar_type());
    roots.push_back(results[i]);
    gradients.push_back(part_of(weights, tensor::held(placements[i]).gradient, group.rank(), group.size()));
  }
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
}

OpOutcome run_trial(const OpTrial& trial, const std::shared_ptr<Group>& group) {
  const OpCase& one = trial.whole.one;
  const Tensors parts = parts_here(trial, *group);
  const int64_t before = bytes_so_far(*group);
  OpOutcome outcome;
  outcome.results = tensor::run_planned({one.op, one.attributes, trial.plan, one.types}, parts,
                                        group->size() == 1 ? nullptr : group);
  const int64_t between = bytes_so_far(*group);
  outcome.bytes = between - before;
  go_back(trial, outcome.results, *group);
  outcome.bytes_back = bytes_so_far(*group) - between;
  for (const at::Tensor& part : parts) outcome.gradients.push_back(part.grad());
  if (!writes(one)) return outcome;
  outcome.results = {parts[0]};
  for (size_t i = 2; i < parts.size(); ++i) outcome.results.push_back(parts[i]);
  return outcome;
}

/// The whole, of the parts that ranks have.
at::Tensor together(const Tensors& parts, const TensorPlacement& placement, const std::string& what) {
  if (placement.is_shard()) return at::cat(parts, placement.dim);
  if (placement.is_partial()) return at::stack(parts).sum(0);
  for (const at::Tensor& part : parts) EXPECT_TRUE(at::equal(part, parts[0])) << what << ": ranks differ";
  return parts[0];
}

void expect_whole(const std::vector<OpOutcome>& outcomes, Tensors OpOutcome::*which, size_t number,
                  const TensorPlacement& placement, const TensorType& type, const at::Tensor& wanted,
                  bool rough, const std::string& what) {
  Tensors parts;
  const auto ranks = std::ssize(outcomes);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const at::Tensor& part = (outcomes[static_cast<size_t>(rank)].*which)[number];
    ASSERT_TRUE(part.defined()) << what << ", rank " << rank;
    ASSERT_EQ(part.sizes(), at::IntArrayRef(tensor::part_shape(type.shape, placement, ranks, rank))) << what;
    ASSERT_EQ(part.scalar_type(), tensor::scalar_type_of(type.dtype)) << what;
    parts.push_back(part.detach());
  }
  const at::Tensor got = together(parts, placement, what).to(at::kDouble);
  EXPECT_TRUE(at::allclose(got, wanted.to(at::kDouble), rough ? 0.05 : 1e-4, rough ? 0.1 : 2e-5))
      << what << ": " << got << "\ninstead of\n"
      << wanted;
}

/// Bytes that gradients travel: of results from as they are held, of operands to that.
int64_t bytes_back(const OpTrial& trial, int64_t ranks) {
  const OpPlan& plan = trial.plan;
  int64_t bytes = 0;
  for (size_t i = 0; i < trial.placements.size(); ++i) {
    const TensorType& type = trial.whole.one.types[i];
    if (!trial.whole.has_gradient(i)) continue;
    bytes += plan::redistribute_bytes(gradient_of_input(plan.strategy, i),
                                      tensor::held(trial.placements[i]).gradient, type.shape,
                                      plan::bytes_of(type.dtype), ranks);
  }
  for (const plan::OpMove& move : plan.moves) {
    const auto result = static_cast<size_t>(move.tensor);
    if (!move.is_result || trial.placements.empty() || !trial.whole.has_gradient(0)) continue;
    const TensorType& type = plan.map.results[result];
    bytes +=
        plan::redistribute_bytes(tensor::held(move.to).gradient, gradient_of_output(plan.strategy, result),
                                 type.shape, plan::bytes_of(type.dtype), ranks);
  }
  return bytes;
}

void expect_dense(const OpTrial& trial, const std::vector<OpOutcome>& outcomes) {
  const auto ranks = std::ssize(outcomes);
  const WholeCase& whole = trial.whole;
  const std::string what = trial.text(ranks);
  const std::vector<TensorPlacement> placements = trial.result_placements();
  const std::vector<TensorType> types = whole.result_types();
  const bool rough = whole.is_rough();
  for (const OpOutcome& outcome : outcomes) {
    ASSERT_EQ(outcome.results.size(), whole.results.size()) << what;
    EXPECT_EQ(outcome.bytes, trial.plan.bytes()) << what;
    EXPECT_EQ(outcome.bytes_back, bytes_back(trial, ranks)) << what << ", backward";
  }
  for (size_t i = 0; i < placements.size(); ++i)
    expect_whole(outcomes, &OpOutcome::results, i, placements[i], types[i], whole.results[i], rough, what);
  for (size_t i = 0; i < whole.inputs.size(); ++i) {
    if (!whole.has_gradient(i)) continue;
    expect_whole(outcomes, &OpOutcome::gradients, i, tensor::held(trial.placements[i]).gradient,
                 whole.one.types[i], whole.gradients[i], rough, fmt::format("{}, gradient of {}", what, i));
  }
}

std::vector<std::vector<OpOutcome>> run_trials(const std::vector<OpTrial>& trials, int64_t ranks) {
  std::vector<std::vector<OpOutcome>> outcomes(trials.size());
  for (auto& of_ranks : outcomes) of_ranks.resize(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](std::shared_ptr<World> world) {
    const auto group = group_of_all(*world);
    for (size_t i = 0; i < trials.size(); ++i) {
      SCOPED_TRACE(trials[i].text(ranks));
      outcomes[i][static_cast<size_t>(group->rank())] = run_trial(trials[i], group);
    }
  });
  return outcomes;
}

void expect_all_dense(int64_t ranks) {
  const std::vector<OpTrial> trials = all_trials(ranks);
  const auto outcomes = run_trials(trials, ranks);
  for (size_t i = 0; i < trials.size(); ++i) {
    expect_dense(trials[i], outcomes[i]);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(OpKernels, EveryOperationHasACase) {
  std::set<Op> found;
  for (const WholeCase& whole : whole_cases()) found.insert(whole.one.op);
  EXPECT_EQ(found.size(), plan::kNames<Op>.size());
}

TEST(OpKernels, OneRankIsDense) {
  expect_all_dense(1);
}
TEST(OpKernels, TwoRanksAreDenseFromEveryLayout) {
  expect_all_dense(2);
}
TEST(OpKernels, FourRanksAreDenseFromEveryLayout) {
  expect_all_dense(4);
}

/// The first result on one rank.
at::Tensor alone(const OpCase& one, const Tensors& inputs) {
  const auto map = factor_map(one.op, one.types, one.attributes);
  const auto way = strategies(map, one.types, 1).front();
  const Tensors results = tensor::run_op({one.op, one.attributes, map, way, one.types}, inputs);
  return results.empty() ? at::Tensor() : results[0];
}

/// Bits are equal, where dense references could be met within rounding.
TEST(OpKernels, RandomNumbersDoNotDependOnThePlacement) {
  for (const WholeCase& whole : whole_cases()) {
    if (whole.one.op != Op::kRandn && whole.one.op != Op::kDropout) continue;
    const at::Tensor wanted = alone(whole.one, whole.inputs);
    for (const int64_t ranks : {2, 3, 4}) {
      for (int64_t rank = 0; rank < ranks; ++rank) {
        for (const OpStrategy& way : strategies(whole.map, whole.one.types, ranks)) {
          if (way.outputs[0].is_partial()) continue;
          Tensors parts;
          for (size_t i = 0; i < whole.inputs.size(); ++i)
            parts.push_back(part_of(whole.inputs[i], way.inputs[i], rank, ranks));
          const OpCase& one = whole.one;
          const Tensors results =
              tensor::run_op({one.op, one.attributes, whole.map, way, one.types, ranks, rank}, parts);
          EXPECT_TRUE(at::equal(results[0], part_of(wanted, way.outputs[0], rank, ranks)))
              << plan::name(one.op) << " " << plan::to_text(way.outputs[0]) << " on rank " << rank << " of "
              << ranks;
        }
      }
    }
  }
}

TEST(OpKernels, RandomNumbersAreNormalAndDropoutKeepsItsShare) {
  const at::Tensor normal = alone({Op::kRandn, {}, plan::OpAttributes::of({0, 1}, {}, {300, 400})}, {});
  EXPECT_NEAR(normal.mean().item<double>(), 0.0, 0.01);
  EXPECT_NEAR(normal.std().item<double>(), 1.0, 0.01);
  const at::Tensor other = alone({Op::kRandn, {}, plan::OpAttributes::of({0, 2}, {}, {300, 400})}, {});
  EXPECT_LT((normal * other).mean().abs().item<double>(), 0.01);
  const OpCase dropout = {Op::kDropout, {{{300, 400}}}, plan::OpAttributes::of({5}, {0.3})};
  const at::Tensor kept = alone(dropout, {at::ones({300, 400})});
  EXPECT_NEAR(kept.mean().item<double>(), 1.0, 0.01);
  EXPECT_NEAR((kept == 0).to(at::kFloat).mean().item<double>(), 0.3, 0.005);
  const OpCase nothing = {Op::kDropout, {{{300, 400}}}, plan::OpAttributes::of({5}, {0.0})};
  EXPECT_TRUE(at::equal(alone(nothing, {normal}), normal));
}

TEST(OpKernels, WhatIsNoPartIsRefused) {
  const OpCase one = {Op::kAdd, {{{5, 4}}, {{4}}}};
  const auto map = factor_map(one.op, one.types, one.attributes);
  const OpStrategy rows = {{TensorPlacement::shard(0), TensorPlacement::replicate()},
                           {TensorPlacement::shard(0)}};
  const tensor::OpCall call = {one.op, one.attributes, map, rows, one.types, 2, 1};
  expect_refusal(
      [&] {
        tensor::run_op(call, {at::ones({3, 4}), at::ones({4})});
      },
      {"[tensor.op_kernels]", "add on rank 1 of 2", "operand 0 is Float (3, 4)", "S(0)", "has (2, 4)"});
  expect_refusal(
      [&] {
        tensor::run_op(call, {at::ones({2, 4}), at::ones({4}, at::kLong)});
      },
      {"operand 1 is Long (4)", "fp32 (4)"});
  expect_refusal([&] { tensor::run_op(call, {at::ones({2, 4})}); }, {"has 1 operands here, 2 types"});
}

TEST(OpKernels, RowsAndClassesThatDoNotExistAreRefused) {
  const at::Tensor words = at::tensor({0, 5}, at::kLong);
  expect_refusal(
      [&] {
        alone({Op::kEmbedding, {{{2}, kInt}, {{5, 4}}}}, {words, at::ones({5, 4})});
      },
      {"[tensor.op_kernels]", "embedding on rank 0 of 1", "index 5 is outside 0 to 4", "below 5"});
  expect_refusal(
      [&] {
        alone({Op::kCrossEntropy, {{{2, 4}}, {{2}, kInt}}}, {at::ones({2, 4}), words - 1});
      },
      {"cross_entropy", "index -1 is outside 0 to 3"});
}

/// A graph that saved a parameter must not go back through what an optimizer wrote since.
TEST(OpKernels, AutogradSeesWhatAnUpdateWrites) {
  const at::Tensor param = at::ones({3}).requires_grad_();
  const at::Tensor squares = (param * param).sum();
  alone({Op::kSgd, {{{3}}, {{3}}}, plan::OpAttributes::of({}, {0.1})}, {param, at::ones({3})});
  EXPECT_TRUE(at::allclose(param.detach(), at::full({3}, 0.9)));
  EXPECT_THROW(squares.backward(), c10::Error);
}

}  // namespace
}  // namespace trireme
