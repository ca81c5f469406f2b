// A training loop of one's own around the engine against the same loop in one process with torch alone:
// every optimizer, policy, number of ranks and of micro-batches, with and without clipping, in one go and
// resumed.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/state/state_file.h"

namespace trireme::test {
namespace {

using comm::World;
using torch::optim::OptimizerParamGroup;

enum class Kind { kTorchAdamW, kTorchSgd, kAdamW };
constexpr const char* kKinds[] = {"torch AdamW", "torch SGD", "our AdamW"};

constexpr double kRate = 0.02;
constexpr double kMaxNorm = 0.7;

/// A large eps: Adam divides tiny gradients by their size, and would blow up their rounding.
torch::optim::AdamWOptions adamw_options() {
  return torch::optim::AdamWOptions(kRate).eps(1e-2).weight_decay(0.1);
}

std::unique_ptr<torch::optim::Optimizer> make_torch(Kind kind, const std::vector<at::Tensor>& tensors) {
  if (kind == Kind::kTorchSgd) {
    return std::make_unique<torch::optim::SGD>(
        tensors, torch::optim::SGDOptions(kRate).momentum(0.9).nesterov(true).weight_decay(0.01));
  }
  return std::make_unique<torch::optim::AdamW>(tensors, adamw_options());
}

/// `kSteps` steps of torch's own loop.
Weights plain_loop(Kind kind, bool clips) {
  Net net(7);
  const auto optimizer = make_torch(kind, net.parameters());
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    (loss_sum(net, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
    if (clips) torch::nn::utils::clip_grad_norm_(net.parameters(), kMaxNorm);
    optimizer->step();
  }
  return copies(parameters_of(net));
}

struct Loop {
  Kind kind = Kind::kTorchAdamW;
  std::string policy;
  int64_t accumulate = 1;
  bool clips = false;
  bool one_unit = false;
  bool by_engine = false;  ///< engine->step(optimizer), else optimizer.step()
};

/// Some of the steps: from a state that was saved or from the start, to a state that is saved or the end.
struct Part {
  int64_t begin = 0, end = kSteps;
  std::string from = {}, to = {};
};

Weights engine_loop(const comm::Mesh& mesh, const Loop& loop, const Part& part = {}) {
  Net net(7 + static_cast<uint64_t>(mesh.world->rank()) + static_cast<uint64_t>(100 * part.begin));
  parallel::WrapOptions options{.policy = loop.policy, .bucket_mib = 0.0005};
  if (loop.one_unit) options.blocks = {"blocks"};
  const auto engine = wrap(net, mesh, options);
  const bool ours = loop.kind == Kind::kAdamW;
  const auto own =
      ours ? optim::adamw(engine->optimizer_params(), {.lr = kRate, .eps = 1e-2, .weight_decay = 0.1})
           : nullptr;
  const auto theirs = ours ? nullptr : make_torch(loop.kind, engine->optimizer_tensors());
  if (!part.from.empty()) {
    own ? state::load_state(*engine, *own, part.from) : state::load_state(*engine, *theirs, part.from);
  }
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  for (int64_t step = part.begin; step < part.end; ++step) {
    const auto x = inputs(step).tensor_split(mesh.dp->size())[rank].tensor_split(loop.accumulate);
    const auto y = targets(step).tensor_split(mesh.dp->size())[rank].tensor_split(loop.accumulate);
    for (size_t i = 0; i < x.size(); ++i) {
      const auto rows = static_cast<double>(x[i].size(0));
      const at::Tensor loss = loss_sum(net, x[i], y[i]) / rows;
      i + 1 == x.size() ? engine->backward(loss, rows) : engine->accumulate(loss, rows);
    }
    if (loop.clips) engine->clip_grad_norm(kMaxNorm);
    if (own) {
      engine->step(*own);
    } else if (loop.by_engine) {
      engine->step(*theirs);
    } else {
      theirs->step();
    }
  }
  if (!part.to.empty()) {
    own ? state::save_state(*engine, *own, part.to) : state::save_state(*engine, *theirs, part.to);
  }
  return weights_of(*engine);
}

/// With one unit, or several.
const std::pair<std::string, bool> kPolicies[] = {
    {"ddp", false}, {"zero2", false}, {"fsdp", true}, {"fsdp", false}};

TEST(OwnLoop, EqualsOneProcessAndPoliciesAgreeInEveryBit) {
  at::set_num_threads(1);
  for (const Kind kind : {Kind::kTorchAdamW, Kind::kTorchSgd, Kind::kAdamW}) {
    for (const bool clips : {false, true}) {
      const Weights wanted = plain_loop(kind, clips);
      for (int64_t ranks = 1; ranks <= 3; ++ranks) {
        run_ranks(ranks, [&](std::shared_ptr<World> world) {
          const comm::Mesh mesh = mesh_of(world);
          for (const int64_t accumulate : {1, 3}) {
            Weights first;
            for (size_t i = 0; i < std::size(kPolicies); ++i) {
              const auto& [policy, one_unit] = kPolicies[i];
              const Loop loop{kind, policy, accumulate, clips, one_unit, /*by_engine=*/i % 2 == 0};
              const std::string what =
                  fmt::format("{} {} on {}, {} micro-batches, clips {}", kKinds[static_cast<int>(kind)],
                              policy, ranks, accumulate, clips);
              const Weights got = engine_loop(mesh, loop);
              expect_close(got, wanted, what);
              if (first.empty()) first = got;
              expect_equal(got, first, what);
              // The same with its second half under the next policy.
              const std::string state =
                  fmt::format("{}own_loop_{}.safetensors", ::testing::TempDir(), ::getpid());
              engine_loop(mesh, loop, {.end = kSteps / 2, .to = state});
              Loop resumed = loop;
              std::tie(resumed.policy, resumed.one_unit) = kPolicies[(i + 1) % std::size(kPolicies)];
              expect_equal(engine_loop(mesh, resumed, {.begin = kSteps / 2, .from = state}), first,
                           fmt::format("{}, then {}", what, resumed.policy));
              if (world->rank() == 0) std::filesystem::remove(state);
            }
          }
        });
      }
    }
  }
}

TEST(OwnLoop, Bf16MastersFollowTorchsOptimizer) {
  for (int64_t ranks = 1; ranks <= 3; ++ranks) {
    run_ranks(ranks, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Weights first;
      for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy, .compute = at::kBFloat16});
        torch::optim::AdamW optimizer(engine->optimizer_tensors(), adamw_options());
        for (int64_t step = 0; step < kSteps; ++step) {
          const auto rank = static_cast<size_t>(mesh.dp_rank);
          const at::Tensor x = inputs(step).chunk(ranks)[rank].to(at::kBFloat16),
                           y = targets(step).chunk(ranks)[rank].to(at::kBFloat16);
          engine->backward(loss_sum(net, x, y) / static_cast<double>(x.size(0)));
          optimizer.step();
        }
        const Weights got = weights_of(*engine);
        if (first.empty()) first = got;
        for (const auto& [name, weight] : first) {
          EXPECT_TRUE(at::equal(got.at(name), weight)) << policy << " on " << ranks << ": " << name;
          EXPECT_FALSE(at::equal(weight, weight.to(at::kBFloat16).to(at::kFloat))) << "masters are fp32";
        }
        // The module computes with what was written last.
        const parallel::DataParallel::Held held(*engine);
        for (auto& [name, param] : parameters_of(net))
          EXPECT_TRUE(at::equal(param.detach(), first.at(name).to(at::kBFloat16))) << policy << ": " << name;
      }
    });
  }
}

TEST(OwnLoop, GroupsHaveRatesAndDecaysOfTheirOwn) {
  const auto is_matrix = [](const at::Tensor& tensor) { return tensor.dim() >= 2; };
  Net plain(7);
  std::vector<at::Tensor> matrices, others;
  std::set<std::string> matrix_names;
  for (auto& [name, param] : parameters_of(plain)) {
    (is_matrix(param) ? matrices : others).push_back(param);
    if (is_matrix(param)) matrix_names.insert(name);
  }
  ASSERT_FALSE(others.empty());
  const auto groups = [](const std::vector<at::Tensor>& decaying, const std::vector<at::Tensor>& rest) {
    return std::vector<OptimizerParamGroup>{
        {decaying, std::make_unique<torch::optim::AdamWOptions>(adamw_options())},
        {rest,
         std::make_unique<torch::optim::AdamWOptions>(adamw_options().lr(kRate / 2).weight_decay(0.0))}};
  };
  torch::optim::AdamW reference(groups(matrices, others), adamw_options());
  for (int64_t step = 0; step < kSteps; ++step) {
    reference.zero_grad();
    (loss_sum(plain, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
    reference.step();
  }
  const Weights wanted = copies(parameters_of(plain));
  for (const bool ours : {false, true}) {
    for (const char* policy : {"ddp", "fsdp"}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy});
        const auto is_one = [&](const std::string& name) { return matrix_names.contains(name); };
        std::unique_ptr<optim::Optimizer> own;
        std::unique_ptr<torch::optim::AdamW> theirs;
        if (ours) {
          own = optim::adamw(engine->optimizer_params([](const std::string&, at::IntArrayRef shape) {
            return shape.size() >= 2 ? optim::Group{} : optim::Group{.lr_factor = 0.5, .decay_factor = 0.0};
          }),
                             {.lr = kRate, .eps = 1e-2, .weight_decay = 0.1});
        } else {
          theirs = std::make_unique<torch::optim::AdamW>(
              groups(engine->optimizer_tensors(is_one),
                     engine->optimizer_tensors([&](const std::string& name) { return !is_one(name); })),
              adamw_options());
        }
        const auto rank = static_cast<size_t>(mesh.dp_rank);
        for (int64_t step = 0; step < kSteps; ++step) {
          engine->backward(loss_sum(net, inputs(step).chunk(2)[rank], targets(step).chunk(2)[rank]) / 6.0);
          ours ? engine->step(*own) : engine->step(*theirs);
        }
        expect_close(weights_of(*engine), wanted, fmt::format("{}, ours {}", policy, ours));
      });
    }
  }
}

TEST(OwnLoop, AnOptimizerOverTheModuleIsRefusedAtItsFirstStep) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    for (const char* policy : {"ddp", "zero1", "fsdp"}) {
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy});
      torch::optim::AdamW wrong(net.parameters(), adamw_options());
      engine->backward(loss_sum(net, inputs(0), targets(0)));
      expect_refusal([&] { engine->step(wrong); }, {"engine->optimizer_tensors()"});
      wrong.step();
      expect_refusal([&] { engine->backward(loss_sum(net, inputs(0), targets(0))); },
                     {"was never used", "engine->optimizer_tensors()", "skip_step"});
      engine->skip_step();
      torch::optim::AdamW right(engine->optimizer_tensors(), adamw_options());
      for (int64_t step = 0; step < 2; ++step) {
        engine->backward(loss_sum(net, inputs(0), targets(0)));
        right.step();
      }
      EXPECT_FALSE(at::equal(weights_of(*engine).begin()->second, weights_of(*engine).rbegin()->second));
    }
  });
}

TEST(OwnLoop, MicroBatchesThatAreNotTheLastSaySo) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    Net net(7);
    const auto engine = wrap(net, mesh_of(world), {.policy = "fsdp"});
    engine->backward(loss_sum(net, inputs(0), targets(0)));
    expect_refusal([&] { engine->backward(loss_sum(net, inputs(1), targets(1))); }, {"accumulate(loss)"});
    expect_refusal([&] { engine->backward(loss_sum(net, inputs(1), targets(1)), -1.0); }, {"weight -1"});
    const auto optimizer = optim::sgd(engine->optimizer_params(), {.lr = 0.1});
    engine->step(*optimizer);  // the refused calls took nothing away
  });
}

TEST(OwnLoop, ClippingReturnsTheNormThatWasAndLeavesTheOneAskedFor) {
  Net plain(7);
  (loss_sum(plain, inputs(0), targets(0)) / static_cast<double>(kBatch)).backward();
  const double wanted = torch::nn::utils::clip_grad_norm_(plain.parameters(), 0.5);
  for (const bool ours : {false, true}) {
    for (const char* policy : {"ddp", "zero2", "fsdp"}) {
      run_ranks(3, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy});
        if (!ours) engine->optimizer_tensors();
        const auto rank = static_cast<size_t>(mesh.dp_rank);
        engine->backward(loss_sum(net, inputs(0).chunk(3)[rank], targets(0).chunk(3)[rank]) / 4.0);
        EXPECT_NEAR(engine->clip_grad_norm(0.5), wanted, 1e-5 * wanted) << policy;
        EXPECT_NEAR(engine->clip_grad_norm(0.5), 0.5, 1e-5) << policy;
        expect_refusal([&] { engine->clip_grad_norm(0.0); }, {"max_norm is 0"});
      });
    }
  }
}

/// Trains with some blocks frozen from step `from` on and thawed at step `until`.
Weights with_frozen_blocks(const std::shared_ptr<World>& world, const std::string& policy, bool ours,
                           int64_t from, int64_t until) {
  const comm::Mesh mesh = mesh_of(world);
  Net net(7);
  const auto engine = wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005});
  const auto own = ours ? optim::sgd(engine->optimizer_params(), {.lr = 0.05}) : nullptr;
  const auto theirs =
      ours ? nullptr
           : std::make_unique<torch::optim::SGD>(engine->optimizer_tensors(), torch::optim::SGDOptions(0.05));
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  for (int64_t step = 0; step < kSteps; ++step) {
    for (const size_t block : {size_t{0}, size_t{2}}) {
      for (auto& param : net.blocks[block]->parameters()) param.requires_grad_(step < from || step >= until);
    }
    const auto x = inputs(step).chunk(mesh.dp->size()), y = targets(step).chunk(mesh.dp->size());
    engine->backward(loss_sum(net, x[rank], y[rank]) / static_cast<double>(x[rank].size(0)));
    ours ? engine->step(*own) : engine->step(*theirs);
  }
  return weights_of(*engine);
}

TEST(OwnLoop, BlocksThatAreFrozenWhileTrainingStayAsTheyAreUntilTheyAreThawed) {
  for (const auto& [from, until] : {std::pair<int64_t, int64_t>{2, 4}, {1, kSteps}, {0, 3}}) {
    Net plain(7);
    for (int64_t step = 0; step < kSteps; ++step) {
      for (const size_t block : {size_t{0}, size_t{2}}) {
        for (auto& param : plain.blocks[block]->parameters())
          param.requires_grad_(step < from || step >= until);
      }
      plain.zero_grad();
      (loss_sum(plain, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
      const at::NoGradGuard no_grad;
      for (auto& param : plain.parameters()) {
        if (param.grad().defined()) param.sub_(param.grad() * 0.05);
      }
    }
    const Weights wanted = copies(parameters_of(plain));
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
      for (const bool ours : {false, true}) {
        for (const int64_t ranks : {1, 2, 3}) {
          run_ranks(ranks, [&](std::shared_ptr<World> world) {
            expect_close(
                with_frozen_blocks(world, policy, ours, from, until), wanted,
                fmt::format("{} on {}, ours {}, frozen from {} until {}", policy, ranks, ours, from, until));
          });
        }
      }
    }
  }
}

TEST(OwnLoop, WhatIsThawedAfterTheOptimizerWasMadeIsNamed) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    Net net(7);
    net.blocks[1]->w1.requires_grad_(false);
    const auto engine = wrap(net, mesh_of(world), {.policy = "fsdp"});
    const auto optimizer = optim::adamw(engine->optimizer_params());
    net.blocks[1]->w1.requires_grad_(true);
    engine->backward(loss_sum(net, inputs(0), targets(0)));
    expect_refusal([&] { engine->step(*optimizer); }, {"blocks.1.w1", "build the optimizer again"});
  });
}

}  // namespace
}  // namespace trireme::test
