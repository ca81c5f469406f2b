// Our layers, and operators on parameters of several units, in an engine of every policy against plain torch
// in one process. Every parameter is in a module of its own, so that units divide the parameters of a layer.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/sgd.h>

#include <string>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/support/own_layers.h"
#include "tests/support/spawn.h"

namespace trireme::test {
namespace {

using comm::World;
using torch::autograd::grad;

constexpr double kLearningRate = 0.05;
constexpr int64_t kLayerSteps = 3;

struct Parameter : torch::nn::Module {
  Parameter(uint64_t seed, at::IntArrayRef shape) {
    value = register_parameter("value", random(seed, shape) + 0.5);
  }
  at::Tensor value;
};

/// A function of a layer's parameters as a module.
struct Layered : torch::nn::Module {
  Layered(const OwnLayer& layer, const OwnLayer::Compute& compute) : compute(compute) {
    for (const auto& shape : layer.shapes) {
      const auto part = std::make_shared<Parameter>(10 + params.size(), shape);
      register_module("p" + std::to_string(params.size()), part);
      params.push_back(part->value);
    }
  }
  at::Tensor loss(const at::Tensor& x) const { return compute(x, params).square().mean(); }

  OwnLayer::Compute compute;
  Tensors params;
};

at::Tensor layer_input(int64_t step, int64_t rank, int64_t micro_batch) {
  return random(static_cast<uint64_t>(5000 + 100 * step + 10 * rank + micro_batch),
                {kLayerRows, kLayerWidth});
}

/// What a loop does besides training.
struct Extras {
  bool hooks = false;      ///< on every parameter: half of its gradient the other way round
  bool asks_grad = false;  ///< of the input and of the parameters, by torch::autograd::grad
};

void add_hooks(const Layered& net) {
  for (const at::Tensor& param : net.params) {
    at::Tensor(param).register_hook([](const at::Tensor& gradient) { return gradient.flip(0) * 0.5; });
  }
}

/// Sums of gradients that are asked for, in between.
double ask_for_gradients(const Layered& net, const at::Tensor& x_in) {
  const at::Tensor x = x_in.clone().requires_grad_();
  double sum = 0.0;
  const auto add = [&](const Tensors& gradients) {
    for (const at::Tensor& each : gradients) sum += each.square().sum().item<double>();
  };
  add(grad({net.loss(x)}, {x}));
  add(grad({net.loss(x)}, net.params));
  return sum;
}

struct LoopOutcome {
  std::vector<double> numbers;  ///< losses, and the gradients that were asked for
  Weights weights;
};

/// In one process, by torch.
std::vector<LoopOutcome> plain_outcomes(const OwnLayer& layer, const Extras& extras, int64_t ranks,
                                        int64_t accumulation) {
  Layered net(layer, layer.theirs);
  if (extras.hooks) add_hooks(net);
  torch::optim::SGD optimizer(net.parameters(), kLearningRate);
  std::vector<LoopOutcome> outcomes(static_cast<size_t>(ranks));
  for (int64_t step = 0; step < kLayerSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t rank = 0; rank < ranks; ++rank) {
      LoopOutcome& mine = outcomes[static_cast<size_t>(rank)];
      for (int64_t i = 0; i < accumulation; ++i) {
        const at::Tensor x = layer_input(step, rank, i);
        if (extras.asks_grad) mine.numbers.push_back(ask_for_gradients(net, x));
        const at::Tensor loss = net.loss(x);
        mine.numbers.push_back(loss.item<double>());
        (loss / static_cast<double>(ranks * accumulation)).backward();
      }
    }
    optimizer.step();
  }
  for (LoopOutcome& each : outcomes) each.weights = copies(parameters_of(net));
  return outcomes;
}

std::unique_ptr<parallel::DataParallel> wrap_layers(Layered& net, const comm::Mesh& mesh,
                                                    const Layout& layout) {
  parallel::WrapOptions options{.policy = layout.policy, .min_unit_numel = 1, .bucket_mib = 0.0001};
  if (!plan::find_policy(layout.policy).shard_parameters) return parallel::data_parallel(net, mesh, options);
  if (layout.one_unit) options.min_unit_numel = int64_t{1} << 50;
  return parallel::fully_shard(net, mesh, options);
}

LoopOutcome outcome_in_engine(const OwnLayer& layer, const Extras& extras, const comm::Mesh& mesh,
                              const Layout& layout, int64_t accumulation) {
  Layered net(layer, layer.ours);
  if (extras.hooks) add_hooks(net);
  const auto engine = wrap_layers(net, mesh, layout);
  torch::optim::SGD optimizer(engine->optimizer_tensors(), kLearningRate);
  LoopOutcome outcome;
  for (int64_t step = 0; step < kLayerSteps; ++step) {
    for (int64_t i = 0; i < accumulation; ++i) {
      const at::Tensor x = layer_input(step, mesh.dp_rank, i);
      if (extras.asks_grad) outcome.numbers.push_back(ask_for_gradients(net, x));
      const at::Tensor loss = net.loss(x);
      outcome.numbers.push_back(loss.item<double>());
      i + 1 < accumulation ? engine->accumulate(loss) : engine->backward(loss);
    }
    optimizer.step();  // the engine is not told: the next use of a parameter shows it
  }
  outcome.weights = weights_of(*engine);
  return outcome;
}

void expect_same(const LoopOutcome& got, const LoopOutcome& wanted, const std::string& what) {
  ASSERT_EQ(got.numbers.size(), wanted.numbers.size()) << what;
  for (size_t i = 0; i < wanted.numbers.size(); ++i)
    EXPECT_NEAR(got.numbers[i], wanted.numbers[i], 1e-4 * std::max(1.0, std::abs(wanted.numbers[i])))
        << what << ", number " << i;
  ASSERT_EQ(got.weights.size(), wanted.weights.size()) << what;
  for (const auto& [name, weight] : wanted.weights)
    EXPECT_TRUE(at::allclose(got.weights.at(name), weight, 1e-4, 1e-5)) << what << ": " << name;
}

std::vector<Layout> layer_layouts(int64_t ranks) {
  std::vector<Layout> all = layouts(ranks);
  all.push_back({"zero3"});
  return all;
}

void expect_as_plain(const std::vector<OwnLayer>& layers, const Extras& extras) {
  at::set_num_threads(1);
  for (const int64_t ranks : {1, 2}) {
    for (const int64_t accumulation : {1, 3}) {
      std::vector<std::vector<LoopOutcome>> wanted;
      for (const OwnLayer& layer : layers)
        wanted.push_back(plain_outcomes(layer, extras, ranks, accumulation));
      for (const Layout& layout : layer_layouts(ranks)) {
        run_ranks(ranks, [&](std::shared_ptr<World> world) {
          const comm::Mesh mesh = mesh_of(world, layout);
          for (size_t i = 0; i < layers.size(); ++i) {
            const std::string what =
                fmt::format("{}, {}, {} micro-batches", layers[i].name, layout.label(ranks), accumulation);
            SCOPED_TRACE(what);
            expect_same(outcome_in_engine(layers[i], extras, mesh, layout, accumulation),
                        wanted[i][static_cast<size_t>(mesh.dp_rank)], what);
          }
        });
      }
    }
  }
}

TEST(OwnLayers, SeeUpdatesThatTheEngineWasNotToldOf) {
  expect_as_plain(own_layers(), {});
}

TEST(OwnLayers, ObeyHooksOnTheirParametersUnderEveryPolicy) {
  expect_as_plain(own_layers(), {.hooks = true});
}

TEST(OwnLayers, ReturnGradientsThatAreAskedForUnderEveryPolicy) {
  std::vector<OwnLayer> layers = own_layers();
  expect_as_plain(layers, {.asks_grad = true});
  layers.resize(3);
  expect_as_plain(layers, {.hooks = true, .asks_grad = true});
}

/// Operators of torch whose arguments are parameters of two or three units.
std::vector<OwnLayer> crossing_operators() {
  using P = const Tensors&;
  using X = const at::Tensor&;
  constexpr int64_t w = kLayerWidth;
  const std::vector<std::vector<int64_t>> square = {{w, w}, {w, w}}, batched = {{2, w, w}, {2, w, w}},
                                          affine = {{w, w}, {w}};
  std::vector<OwnLayer> all = {
      {"linear", affine, [](X x, P p) { return at::linear(x.tanh(), p[0], p[1]); }, {}},
      {"addmm", affine, [](X x, P p) { return at::addmm(p[1], x, p[0]); }, {}},
      {"mm", square, [](X x, P p) { return x.mm(at::mm(p[0], p[1].t())); }, {}},
      {"bmm", batched, [](X x, P p) { return x.mean() * at::bmm(p[0], p[1]); }, {}},
      {"baddbmm",
       {{2, w, w}, {2, w, w}, {w}},
       [](X x, P p) { return x.mean() * at::baddbmm(p[2], p[0], p[1]); },
       {}},
      {"einsum",
       square,
       [](X x, P p) {
         return at::einsum("bi,ij,kj->bk", {x, p[0], p[1]});
       },
       {}},
      {"conv1d", {{w, w, 3}, {w}}, [](X x, P p) { return at::conv1d(x.t().unsqueeze(0), p[0], p[1]); }, {}},
      {"sdpa",
       {{1, 2, 4, w}, {1, 2, 4, w}, {1, 2, 4, w}},
       [](X x, P p) { return x.mean() * at::scaled_dot_product_attention(p[0], p[1], p[2]); },
       {}},
      {"multi_dot",
       square,
       [](X x, P p) {
         return at::linalg_multi_dot({x, p[0], p[1]});
       },
       {}},
      {"cdist", square, [](X x, P p) { return x.mean() * at::cdist(p[0], p[1]); }, {}},
      {"prelu", {{4, w}, {w}}, [](X x, P p) { return x.mean() * at::prelu(p[0], p[1]); }, {}},
      {"binary cross-entropy",
       square,
       [](X x, P p) { return x.mean() * at::binary_cross_entropy_with_logits(p[0], p[1]); },
       {}},
      {"huber loss", square, [](X x, P p) { return x.mean() * at::huber_loss(p[0], p[1]); }, {}},
      {"scatter_add",
       square,
       [](X x, P p) {
         return x.mm(at::scatter_add(p[0], 0, at::arange(w).view({1, w}).expand({w, w}).contiguous(), p[1]));
       },
       {}},
      {"solve_triangular",
       square,
       [](X x, P p) {
         return 0.01 * x.mean() *
                at::linalg_solve_triangular(p[0], p[1], /*upper=*/true, /*left=*/true,
                                            /*unitriangular=*/true);
       },
       {}},
      {"weight norm",
       {{w, w}, {w, 1}},
       [](X x, P p) { return at::linear(x, at::_weight_norm(p[0], p[1], 0)); },
       {}},
      {"bilinear", {{3, w, w}, {3}}, [](X x, P p) { return at::bilinear(x, x, p[0], p[1]); }, {}},
      {"layer_norm", {{w}, {w}}, [](X x, P p) { return at::layer_norm(x, {w}, p[0], p[1]); }, {}},
      {"cat and sum",
       square,
       [](X x, P p) {
         return x.mm(at::cat({p[0], p[1]}).view({2, w, w}).sum(0));
       },
       {}},
      {"where", square, [](X x, P p) { return x.mm(at::where(p[0] > 0.5, p[0], p[1])); }, {}},
      {"lerp", {{w, w}, {w, w}, {w, w}}, [](X x, P p) { return x.mm(at::lerp(p[0], p[1], p[2])); }, {}},
      {"in turns",
       {{w, w}, {w, w}, {w}},
       [](X x, P p) {
         at::Tensor y = x;
         for (int64_t i = 0; i < 3; ++i) y = at::linear(at::mm(y, p[0] + p[1]).tanh(), p[i % 2], p[2]);
         return y;
       },
       {}},
  };
  for (OwnLayer& each : all) each.theirs = each.ours;
  return all;
}

TEST(OwnLayers, OperatorsMayCrossUnits) {
  expect_as_plain(crossing_operators(), {});
}

}  // namespace
}  // namespace trireme::test
