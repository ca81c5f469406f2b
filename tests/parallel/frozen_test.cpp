// Parameters that are frozen before, while and after an optimizer is made, as torch has it; and ranks that do
// not freeze the same ones.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/parallel/every_layout.h"
#include "tests/parallel/normed_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/plan/policy.h"
#include "trireme/state/state_file.h"

namespace trireme::test {
namespace {

using comm::World;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// A part of one unit and all of another are frozen from the start, then thawed, and once more frozen.
void freeze_in(Net& net, int64_t step) {
  const bool trains = step == 2 || step == 3 || step > 4;
  net.blocks[0]->w1.requires_grad_(trains);
  for (auto& param : net.blocks[2]->parameters()) param.requires_grad_(trains);
}

constexpr double kFrozenMaxNorm = 0.7;

template <typename Options>
Options rate_of() {
  return Options(0.02).eps(1e-2);  // a large eps: rounding of tiny gradients stays small
}

template <typename Optimizer, typename Options>
Weights plain_loop(std::vector<double>& norms) {
  Net net(7);
  freeze_in(net, 0);
  Optimizer optimizer(net.parameters(), rate_of<Options>());
  for (int64_t step = 0; step < kSteps; ++step) {
    freeze_in(net, step);
    optimizer.zero_grad();
    (loss_sum(net, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
    norms.push_back(torch::nn::utils::clip_grad_norm_(net.parameters(), kFrozenMaxNorm));
    optimizer.step();
  }
  return copies(parameters_of(net));
}

/// With `path`, the state is saved and loaded while the parameters are frozen for the first time.
template <typename Optimizer, typename Options>
void expect_trained_as_plain(const std::string& path = {}) {
  std::vector<double> norms;
  const Weights wanted = plain_loop<Optimizer, Options>(norms);
  for (const int64_t ranks : {1, 2, 3}) {
    for (const Layout& layout : every_layout(ranks)) {
      run_ranks(ranks, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7 + static_cast<uint64_t>(world->rank()));
        freeze_in(net, 0);
        const auto engine = wrap_as(net, mesh, layout);
        auto optimizer = std::make_unique<Optimizer>(engine->optimizer_tensors(), rate_of<Options>());
        for (int64_t step = 0; step < kSteps; ++step) {
          if (step == 1 && !path.empty()) {
            state::save_state(*engine, *optimizer, path);
            optimizer = std::make_unique<Optimizer>(engine->optimizer_tensors(), rate_of<Options>());
            state::load_state(*engine, *optimizer, path);
          }
          freeze_in(net, step);
          backward_of(net, *engine, step);
          const double norm = engine->clip_grad_norm(kFrozenMaxNorm),
                       expected = norms[static_cast<size_t>(step)];
          EXPECT_NEAR(norm, expected, 1e-5 * expected) << layout.label(ranks) << " in step " << step;
          step % 2 == 0 ? engine->step(*optimizer) : static_cast<void>(optimizer->step());
        }
        expect_close(weights_of(*engine), wanted, layout.label(ranks));
      });
    }
  }
}

TEST(Frozen, WhenTorchsOptimizerIsMadeIsTrainedOnceItIsThawed) {
  at::set_num_threads(1);
  expect_trained_as_plain<torch::optim::AdamW, torch::optim::AdamWOptions>();
}

/// Adagrad has a state of parameters before their first gradient.
TEST(Frozen, IsInTheStateThatIsLoaded) {
  at::set_num_threads(1);
  expect_trained_as_plain<torch::optim::AdamW, torch::optim::AdamWOptions>(scratch("thawed-adamw"));
  expect_trained_as_plain<torch::optim::Adagrad, torch::optim::AdagradOptions>(scratch("thawed-adagrad"));
}

TEST(Frozen, TensorsAreHandedOutWithoutAGradient) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    for (const Layout& layout : every_layout(2)) {
      const comm::Mesh mesh = mesh_of(world, layout);
      Net net(7);
      net.blocks[1]->w2.requires_grad_(false);
      const auto engine = wrap_as(net, mesh, layout);
      const auto tensors = engine->named_optimizer_tensors();
      EXPECT_EQ(tensors.size(), parameters_of(net).size());
      backward_of(net, *engine, 0);
      for (const auto& [name, tensor] : tensors)
        EXPECT_EQ(tensor.grad().defined(), name != "blocks.1.w2") << layout.label(2) << ": " << name;
    }
  });
}

/// `frozen` requires no gradient on one rank alone, for a step that is then repeated.
void expect_refused_on_all(const Layout& layout, int64_t freezes, bool sums) {
  Net plain(7);
  const Weights wanted = reference(plain);
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const std::string what = fmt::format("{}, rank {} freezes, sums {}", layout.label(2), freezes, sums);
    const comm::Mesh mesh = mesh_of(world, layout);
    Net net(7);
    const auto engine = wrap(net, mesh,
                             {.policy = layout.policy,
                              .bucket_mib = layout.one_unit ? 25.0 : 0.0005,
                              .average = sums ? parallel::Average::kSum : parallel::Average::kMean});
    SGD optimizer(engine->optimizer_tensors(), SGDOptions(0.05));
    const auto differentiate = [&](int64_t step) {
      const auto rank = static_cast<size_t>(mesh.dp_rank);
      engine->backward(loss_sum(net, inputs(step).chunk(2)[rank], targets(step).chunk(2)[rank]) /
                       static_cast<double>(sums ? kBatch : kBatch / 2));
      if (sums) engine->grad_norm();
    };
    for (int64_t step = 0; step < kSteps; ++step) {
      if (step == 2) {
        if (world->rank() == freezes) net.blocks[1]->w1.requires_grad_(false);
        if (plan::find_policy(layout.policy).shard_parameters) {
          // Ranks may gather in different orders from here on: then their collectives say who froze what.
          const std::string its_words =
              fmt::format("blocks.1.w1 was frozen)' {}", world->rank() == freezes ? "here" : "on group rank");
          const std::string compared = fmt::format("on rank {}, but not on rank {}", 1 - freezes, freezes);
          return expect_thrown<Error>([&] { differentiate(step); },
                                      {layout.replicas == 1 ? its_words : compared, "blocks.1.w1"}, what);
        }
        expect_thrown<LogicError>(
            [&] { differentiate(step); },
            {"frozen different parameters", "blocks.1.w1",
             fmt::format("on rank {}, but not on rank {}", 1 - freezes, freezes), "on all ranks"},
            what);
        engine->skip_step();
        net.blocks[1]->w1.requires_grad_(true);
      }
      differentiate(step);
      engine->step(optimizer);
    }
    expect_close(weights_of(*engine), wanted, what);
  });
}

TEST(Frozen, OnOneRankAloneIsNamedOnAllRanks) {
  at::set_num_threads(1);
  for (const Layout& layout : every_layout(2)) expect_refused_on_all(layout, 1, false);
  for (const char* policy : {"ddp", "zero2", "fsdp"}) expect_refused_on_all({policy}, 0, false);
}

/// Ranks exchange nothing in a step of sums, but for its norm.
TEST(Frozen, OnOneRankAloneIsNamedByTheNormOfSums) {
  at::set_num_threads(1);
  for (const Layout& layout : every_layout(2)) expect_refused_on_all(layout, 1, true);
}

}  // namespace
}  // namespace trireme::test
