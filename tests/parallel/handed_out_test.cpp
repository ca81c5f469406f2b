// What a loop of one's own does with engine->optimizer_tensors() and their gradients between backward and the
// next pass: drops or edits gradients, steps without the engine, saves.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <cmath>
#include <sstream>
#include <string>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/parallel/normed_net.h"
#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/state/state_file.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr double kRate = 0.05;

/// The mean loss of a step's rows, all of them or this rank's.
at::Tensor mean_loss(const Net& net, int64_t step) {
  return loss_sum(net, inputs(step), targets(step)) / static_cast<double>(kBatch);
}
at::Tensor mean_loss(const Net& net, int64_t step, const comm::Mesh& mesh) {
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  const at::Tensor x = inputs(step).chunk(mesh.dp->size())[rank],
                   y = targets(step).chunk(mesh.dp->size())[rank];
  return loss_sum(net, x, y) / static_cast<double>(x.size(0));
}

TEST(HandedOut, GradientsMayBeDroppedByZeroGrad) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    for (const char* policy : {"ddp", "zero2", "fsdp"}) {
      for (const bool to_none : {true, false}) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy});
        SGD optimizer(engine->optimizer_tensors(), SGDOptions(kRate));
        const Weights before = weights_of(*engine);
        engine->backward(mean_loss(net, 0, mesh));
        optimizer.zero_grad(to_none);
        EXPECT_EQ(engine->grad_norm(), 0.0) << policy;
        engine->skip_step();
        expect_equal(weights_of(*engine), before, policy);
        engine->backward(mean_loss(net, 0, mesh));
        engine->step(optimizer);
        EXPECT_FALSE(at::equal(weights_of(*engine).at("head"), before.at("head"))) << policy;
      }
    }
  });
}

TEST(HandedOut, LbfgsTrainsWithAndWithoutZeroGradInItsClosure) {
  const auto options = [](bool searches) {
    auto made = torch::optim::LBFGSOptions(0.5).max_iter(4);
    return searches ? made.line_search_fn("strong_wolfe") : made;
  };
  for (const bool searches : {false, true}) {
    Net plain(7);
    torch::optim::LBFGS reference(plain.parameters(), options(searches));
    for (int64_t step = 0; step < 3; ++step) {
      reference.step([&] {
        reference.zero_grad();
        const at::Tensor loss = mean_loss(plain, 0);
        loss.backward();
        return loss;
      });
    }
    const Weights wanted = copies(parameters_of(plain));
    for (const bool zeroes : {false, true}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = "ddp"});
        torch::optim::LBFGS optimizer(engine->optimizer_tensors(), options(searches));
        for (int64_t step = 0; step < 3; ++step) {
          optimizer.step([&] {
            if (zeroes) optimizer.zero_grad();
            const at::Tensor loss = mean_loss(net, 0, mesh);
            engine->backward(loss);
            at::Tensor mean = loss.detach().reshape({1});
            mesh.dp->all_reduce(mean, comm::ReduceOp::kSum);
            return mean[0] / mesh.dp->size();
          });
        }
        const Weights got = weights_of(*engine);
        for (const auto& [name, weight] : wanted)
          EXPECT_TRUE(at::allclose(got.at(name), weight, 1e-3, 1e-4)) << name << searches << zeroes;
      });
    }
  }
}

/// Clips the gradient of `params` after every element was limited to `limit`, as a plain loop does it.
double clip_values_and_norm(const std::vector<at::Tensor>& params, double limit, double max_norm) {
  torch::nn::utils::clip_grad_value_(params, limit);
  return torch::nn::utils::clip_grad_norm_(params, max_norm);
}

TEST(HandedOut, TheNormIsThatOfGradientsAsTheyWereEdited) {
  constexpr double kLimit = 0.02, kMaxNorm = 0.05;
  Net plain(7);
  mean_loss(plain, 0).backward();
  const double wanted = clip_values_and_norm(plain.parameters(), kLimit, kMaxNorm);
  ASSERT_GT(wanted, kMaxNorm);
  for (const int64_t ranks : {1, 3}) {
    for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
      for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
        run_ranks(ranks, [&](std::shared_ptr<World> world) {
          const std::string what = fmt::format("{} on {}, {}", policy, ranks, c10::toString(compute));
          const double near = compute == at::kFloat ? 1e-5 : 2e-2;
          const comm::Mesh mesh = mesh_of(world);
          Net net(7);
          const auto engine = wrap(net, mesh, {.policy = policy, .compute = compute});
          const std::vector<at::Tensor> tensors = engine->optimizer_tensors();
          const auto differentiate = [&] {
            const auto rank = static_cast<size_t>(mesh.dp_rank);
            const at::Tensor x = inputs(0).chunk(ranks)[rank].to(compute), y = targets(0).chunk(ranks)[rank];
            engine->backward(
                (net.forward(x).to(at::kFloat) - y).square().sum() / static_cast<double>(x.size(0)), 3.0);
          };
          differentiate();
          const double unedited = engine->grad_norm();
          torch::nn::utils::clip_grad_value_(tensors, kLimit);
          EXPECT_NEAR(engine->clip_grad_norm(kMaxNorm), wanted, near * wanted) << what;
          EXPECT_NEAR(engine->grad_norm(), kMaxNorm, near * kMaxNorm) << what;
          engine->skip_step();
          differentiate();
          EXPECT_DOUBLE_EQ(engine->grad_norm(), unedited) << what << ": an edit ends with its step";
          engine->clip_grad_norm(unedited / 2);
          EXPECT_NEAR(engine->grad_norm(), unedited / 2, 1e-5 * unedited) << what;
          if (world->rank() == 0) {  // another tensor as gradient, on one rank alone
            for (at::Tensor tensor : tensors) tensor.mutable_grad() = tensor.grad().clone();
          }
          EXPECT_NEAR(engine->grad_norm(), unedited / 2, 1e-5 * unedited) << what;
        });
      }
    }
  }
}

/// One rank reduces nothing: gradients that would travel in the dtype of computation stay in it until they
/// are handed out.
TEST(HandedOut, GradientsOfOneRankAreTheMeanByWeightOfItsMicroBatches) {
  constexpr double kFirst = 1.0, kSecond = 3.0;
  const auto loss_of = [](const Net& net, int64_t step, at::ScalarType dtype) {
    return loss_sum(net, inputs(step).to(dtype), targets(step).to(dtype)) / static_cast<double>(kBatch);
  };
  Net plain(7);
  const at::Tensor mean =
      (kFirst * loss_of(plain, 0, at::kFloat) + kSecond * loss_of(plain, 1, at::kFloat)) / (kFirst + kSecond);
  mean.backward();
  const Weights wanted = parameters_of(plain);
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      run_ranks(1, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy, .compute = compute, .reduce = compute});
        const auto tensors = engine->named_optimizer_tensors();
        engine->accumulate(loss_of(net, 0, compute), kFirst);
        engine->backward(loss_of(net, 1, compute), kSecond);
        for (const auto& [name, tensor] : tensors) {
          EXPECT_LT(relative_error(tensor.grad(), wanted.at(name).grad()),
                    compute == at::kFloat ? 1e-5 : 5e-2)
              << policy << " in " << c10::toString(compute) << ": " << name;
        }
      });
    }
  }
}

TEST(HandedOut, LocalSgdAveragesAfterStepsWithoutTheEngine) {
  for (const char* policy : {"ddp", "fsdp:no_shard"}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      const auto train = [&](bool by_engine) {
        Net net(7);
        const auto engine = wrap(
            net, mesh, {.policy = policy, .hook = {.hook = parallel::Hook::kLocalSgd, .local_steps = 2}});
        SGD optimizer(engine->optimizer_tensors(), SGDOptions(kRate));
        for (int64_t step = 0; step < kSteps; ++step) {
          engine->backward(mean_loss(net, step, mesh));
          by_engine ? engine->step(optimizer) : static_cast<void>(optimizer.step());
        }
        return weights_of(*engine);
      };
      Net plain(7);
      SGD reference(plain.parameters(), SGDOptions(kRate));
      for (int64_t step = 0; step < kSteps; ++step) {
        reference.zero_grad();
        mean_loss(plain, step, mesh).backward();
        reference.step();
        if (step % 2 == 0) continue;
        const at::NoGradGuard no_grad;
        for (auto& [name, param] : parameters_of(plain)) {
          at::Tensor sum = param.detach().clone();
          mesh.dp->all_reduce(sum, comm::ReduceOp::kSum);
          at::Tensor(param).copy_(sum / 2.0);
        }
      }
      const Weights got = train(false);
      expect_equal(got, train(true), policy);
      expect_close(got, copies(parameters_of(plain)), policy);
    });
  }
}

TEST(HandedOut, LocalSgdCountsAStepWithoutTheEngineBeforeItSaves) {
  for (const char* policy : {"ddp", "fsdp:no_shard"}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      const auto engine =
          wrap(net, mesh, {.policy = policy, .hook = {.hook = parallel::Hook::kLocalSgd, .local_steps = 2}});
      SGD optimizer(engine->optimizer_tensors(), SGDOptions(kRate));
      engine->backward(mean_loss(net, 0, mesh));
      optimizer.step();
      const std::string path = scratch("local-plain-step.safetensors");
      expect_refusal([&] { state::save_state(*engine, optimizer, path); },
                     {"1 steps after the last averaging"});
      engine->average_parameters();
      const Weights mine = weights_of(*engine);
      at::Tensor head = mine.at("head").clone();
      mesh.dp->all_reduce(head, comm::ReduceOp::kSum);
      EXPECT_TRUE(at::equal(head / 2.0, mine.at("head"))) << "all ranks have the mean";
      state::save_state(*engine, optimizer, path);
    });
  }
}

TEST(HandedOut, NoticedUpdatesAreInWhatTorchSaves) {
  for (const char* policy : {"ddp", "zero1", "zero2"}) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy, .compute = compute});
        SGD optimizer(engine->optimizer_tensors(), SGDOptions(kRate));
        engine->backward((net.forward(inputs(0).to(compute)) - targets(0).to(compute)).square().sum());
        optimizer.step();
        engine->notice_update();
        torch::serialize::OutputArchive written;
        net.save(written);
        std::stringstream stream;
        written.save_to(stream);
        Net copy(1);
        copy.to(compute);
        torch::serialize::InputArchive read;
        read.load_from(stream);
        copy.load(read);
        Weights wanted = weights_of(*engine);
        for (auto& [name, weight] : wanted) weight = weight.to(compute);
        expect_equal(copies(parameters_of(copy)), wanted,
                     fmt::format("{} {}", policy, c10::toString(compute)));
        engine->notice_update();  // nothing was written since
      });
    }
  }
}

}  // namespace
}  // namespace trireme
