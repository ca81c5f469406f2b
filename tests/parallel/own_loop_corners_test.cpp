// What loops of one's own do besides the usual: several engines or optimizers, schedules of the learning
// rate, tiny modules, updates while parameters are held, a module that is wrapped again.
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include <string>
#include <vector>

#include "tests/parallel/layouts.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"

namespace trireme::test {
namespace {

using comm::World;
using torch::optim::SGD;
using torch::optim::SGDOptions;

constexpr const char* kCornerPolicies[] = {"ddp", "zero1", "zero2", "fsdp"};
constexpr double kCornerRate = 0.05;

/// The mean loss of this rank's rows of a step.
at::Tensor loss_of(const Net& net, int64_t step, const comm::Mesh& mesh) {
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  const at::Tensor x = inputs(step).chunk(mesh.dp->size())[rank],
                   y = targets(step).chunk(mesh.dp->size())[rank];
  return loss_sum(net, x, y) / static_cast<double>(x.size(0));
}

TEST(OwnLoopCorners, TwoEnginesInOneLoopDoNotMeet) {
  Net one(7), other(8);
  const Weights wanted = reference(one, kCornerRate), others = reference(other, kCornerRate);
  for (const char* policy : kCornerPolicies) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net a(7), b(8);
      const auto first = wrap(a, mesh, {.policy = policy}), second = wrap(b, mesh, {.policy = "fsdp"});
      SGD first_optimizer(first->optimizer_tensors(), SGDOptions(kCornerRate));
      SGD second_optimizer(second->optimizer_tensors(), SGDOptions(kCornerRate));
      for (int64_t step = 0; step < kSteps; ++step) {
        const at::Tensor first_loss = loss_of(a, step, mesh), second_loss = loss_of(b, step, mesh);
        second->backward(second_loss);
        first->backward(first_loss);
        first_optimizer.step();
        second->step(second_optimizer);
      }
      expect_close(weights_of(*first), wanted, policy);
      expect_close(weights_of(*second), others, policy);
    });
  }
}

/// The teacher follows the student, which is drawn back to it.
void blend(const Net& teacher, const Net& student) {
  const at::NoGradGuard no_grad;
  const std::vector<at::Tensor> slow = teacher.parameters(), fast = student.parameters();
  for (size_t i = 0; i < slow.size(); ++i) slow[i].lerp_(fast[i], 0.25);
  for (size_t i = 0; i < slow.size(); ++i) fast[i].lerp_(slow[i], 0.125);
}

TEST(OwnLoopCorners, AnOperatorOnParametersOfTwoEnginesReachesBoth) {
  Net teacher(7), student(8);
  for (int64_t step = 0; step < kSteps; ++step) {
    student.zero_grad();
    (loss_sum(student, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& param : student.parameters()) param.sub_(param.grad() * kCornerRate);
    }
    blend(teacher, student);
  }
  const Weights wanted = copies(parameters_of(teacher)), others = copies(parameters_of(student));
  for (const bool teacher_has_more : {false, true}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net slow(7), fast(8);
      const std::vector<std::string> few = {"blocks.1"},
                                     many = {"blocks.0", "blocks.1", "blocks.2", "blocks.3"};
      const auto first = parallel::fully_shard(slow, mesh, {.blocks = teacher_has_more ? many : few});
      const auto second = parallel::fully_shard(fast, mesh, {.blocks = teacher_has_more ? few : many});
      const auto optimizer = optim::build(descent(kCornerRate), second->optimizer_params());
      for (int64_t step = 0; step < kSteps; ++step) {
        second->backward(loss_of(fast, step, mesh));
        second->step(*optimizer);
        blend(slow, fast);
      }
      expect_close(weights_of(*first), wanted, "teacher");
      expect_close(weights_of(*second), others, "student");
    });
  }
}

TEST(OwnLoopCorners, TwoOptimizersShareAnEngineAndEachHasASchedule) {
  const auto is_second = [](const std::string& name) { return name.starts_with("blocks.2"); };
  const auto train = [&](SGD& some, SGD& rest, const auto& differentiate) {
    torch::optim::StepLR schedule(some, /*step_size=*/2, /*gamma=*/0.5);
    for (int64_t step = 0; step < kSteps; ++step) {
      differentiate(step);
      some.step();
      rest.step();
      schedule.step();
    }
  };
  Net plain(7);
  std::vector<at::Tensor> chosen, others;
  for (const auto& [name, param] : parameters_of(plain)) (is_second(name) ? chosen : others).push_back(param);
  SGD plain_some(chosen, SGDOptions(kCornerRate)),
      plain_rest(others, SGDOptions(kCornerRate / 2).momentum(0.5));
  train(plain_some, plain_rest, [&](int64_t step) {
    plain.zero_grad();
    (loss_sum(plain, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
  });
  const Weights wanted = copies(parameters_of(plain));
  for (const char* policy : kCornerPolicies) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy});
      SGD some(engine->optimizer_tensors(is_second), SGDOptions(kCornerRate));
      SGD rest(engine->optimizer_tensors([&](const std::string& name) { return !is_second(name); }),
               SGDOptions(kCornerRate / 2).momentum(0.5));
      train(some, rest, [&](int64_t step) { engine->backward(loss_of(net, step, mesh)); });
      expect_close(weights_of(*engine), wanted, policy);
    });
  }
}

TEST(OwnLoopCorners, AModuleOfFewerElementsThanRanksTrains) {
  const auto x = at::full({4, 1}, 2.0);
  torch::nn::Linear plain(1, 1);
  const at::Tensor start_weight = plain->weight.detach().clone(), start_bias = plain->bias.detach().clone();
  SGD reference(plain->parameters(), SGDOptions(0.01));
  for (int64_t step = 0; step < 3; ++step) {
    reference.zero_grad();
    plain->forward(x).square().mean().backward();
    reference.step();
  }
  for (const char* policy : kCornerPolicies) {
    for (const bool ours : {false, true}) {
      run_ranks(4, [&](std::shared_ptr<World> world) {
        torch::nn::Linear net(1, 1);
        net->weight.set_data(start_weight.clone());
        net->bias.set_data(start_bias.clone());
        const comm::Mesh mesh = mesh_of(world);
        const bool shards = plan::find_policy(policy).shard_parameters;
        const parallel::WrapOptions options{.policy = policy};
        const auto engine = shards ? parallel::fully_shard(*net, mesh, options)
                                   : parallel::data_parallel(*net, mesh, options);
        const auto own = ours ? optim::sgd(engine->optimizer_params(), {.lr = 0.01}) : nullptr;
        SGD theirs(ours ? std::vector<at::Tensor>() : engine->optimizer_tensors(), SGDOptions(0.01));
        for (int64_t step = 0; step < 3; ++step) {
          engine->backward(net->forward(x).square().mean());
          EXPECT_GT(engine->clip_grad_norm(1e9), 0.0);
          if (ours) {
            engine->step(*own);
          } else {
            theirs.step();
          }
        }
        const Weights got = weights_of(*engine);
        EXPECT_TRUE(at::allclose(got.at("weight"), plain->weight.detach(), 1e-5)) << policy;
        EXPECT_TRUE(at::allclose(got.at("bias"), plain->bias.detach(), 1e-5)) << policy;
      });
    }
  }
}

TEST(OwnLoopCorners, WhatIsHeldSeesAnUpdate) {
  for (const char* policy : kCornerPolicies) {
    for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const auto engine = wrap(net, mesh, {.policy = policy, .compute = compute});
        SGD optimizer(engine->optimizer_tensors(), SGDOptions(kCornerRate));
        engine->backward((net.forward(inputs(0).to(compute)) - targets(0).to(compute)).square().mean());
        const parallel::DataParallel::Held held(*engine);
        engine->step(optimizer);
        const Weights masters = weights_of(*engine);
        for (const auto& [name, param] : parameters_of(net))
          EXPECT_TRUE(at::equal(param.detach(), masters.at(name).to(compute))) << policy << ": " << name;
        EXPECT_TRUE(net.forward(inputs(1).to(compute)).isfinite().all().item<bool>());
      });
    }
  }
}

TEST(OwnLoopCorners, AModuleIsWrappedAgainUnderAnotherPolicy) {
  Net plain(7);
  const Weights wanted = reference(plain, kCornerRate);
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    for (int64_t step = 0; step < kSteps; ++step) {
      const auto engine = wrap(net, mesh, {.policy = kCornerPolicies[step % std::size(kCornerPolicies)]});
      SGD optimizer(engine->optimizer_tensors(), SGDOptions(kCornerRate));
      engine->backward(loss_of(net, step, mesh));
      optimizer.step();
    }
    expect_close(copies(parameters_of(net)), wanted, "the module alone");
  });
}

TEST(OwnLoopCorners, AnOptimizerThatThrowsLeavesTheGradient) {
  struct Broken : SGD {
    using SGD::SGD;
    torch::Tensor step(LossClosure) override { throw std::runtime_error("no step"); }
  };
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    for (const char* policy : kCornerPolicies) {
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy});
      Broken broken(engine->optimizer_tensors(), SGDOptions(kCornerRate));
      SGD right(engine->optimizer_tensors(), SGDOptions(kCornerRate));
      engine->backward(loss_of(net, 0, mesh));
      EXPECT_THROW(engine->step(broken), std::runtime_error);
      engine->step(right);
      EXPECT_THROW(engine->step(right), LogicError) << "there is no gradient any more";
    }
  });
}

TEST(OwnLoopCorners, MicroBatchesWithoutWeightCountForNothing) {
  Net plain(7);
  const Weights wanted = reference(plain, kCornerRate);
  for (const char* policy : kCornerPolicies) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      const auto engine = wrap(net, mesh, {.policy = policy});
      const auto optimizer = optim::sgd(engine->optimizer_params(), {.lr = kCornerRate});
      for (int64_t step = 0; step < kSteps; ++step) {
        engine->accumulate(loss_of(net, step + 100, mesh), 0.0);
        engine->backward(loss_of(net, step, mesh), 0.25);
        engine->step(*optimizer);
      }
      expect_close(weights_of(*engine), wanted, policy);
      engine->accumulate(loss_of(net, 0, mesh), 0.0);
      expect_refusal([&] { engine->backward(loss_of(net, 0, mesh), 0.0); }, {"weight 0"});
      engine->backward(loss_of(net, 0, mesh));
      engine->step(*optimizer);
    });
  }
}

TEST(OwnLoopCorners, ALossIsOneNumberOfAnyShapeAndOthersAreRefused) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    for (const char* policy : kCornerPolicies) {
      Net net(7), same(7);
      const auto engine = wrap(net, mesh, {.policy = policy}), other = wrap(same, mesh, {.policy = policy});
      SGD optimizer(engine->optimizer_tensors(), SGDOptions(kCornerRate));
      SGD as_scalars(other->optimizer_tensors(), SGDOptions(kCornerRate));
      engine->accumulate(loss_of(net, 0, mesh).view({1}));
      other->accumulate(loss_of(same, 0, mesh));
      expect_refusal([&] { engine->backward(at::Tensor()); }, {"[parallel.backward]", "undefined"});
      expect_refusal([&] { engine->backward(net.forward(inputs(0))); }, {"no scalar", "(12, 3)", "mean()"});
      expect_refusal([&] { engine->accumulate(loss_of(net, 1, mesh).detach()); },
                     {"[parallel.backward]", "does not require a gradient"});
      expect_refusal([&] { engine->backward(at::Tensor(), at::ones({2}), 1.0); }, {"output", "undefined"});
      engine->backward(loss_of(net, 1, mesh).view({1, 1}));  // refused calls took nothing away
      other->backward(loss_of(same, 1, mesh));
      engine->step(optimizer);
      other->step(as_scalars);
      expect_equal(weights_of(*engine), weights_of(*other), policy);
    }
  });
}

/// Makes `dtype` that of tensors for which none is named, while this lives.
class DefaultDtype {
 public:
  explicit DefaultDtype(at::ScalarType dtype) { c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype)); }
  ~DefaultDtype() { c10::set_default_dtype(before_); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;

 private:
  caffe2::TypeMeta before_ = c10::get_default_dtype();
};

TEST(OwnLoopCorners, AnotherDefaultDtypeChangesNothing) {
  Net plain(7);
  const Weights wanted = reference(plain, kCornerRate);
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    for (const char* policy : kCornerPolicies) {
      std::vector<std::shared_ptr<Net>> nets = {std::make_shared<Net>(7), std::make_shared<Net>(7)};
      const DefaultDtype other(dtype);
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net& net = *nets[static_cast<size_t>(world->rank())];
        const auto engine = wrap(net, mesh, {.policy = policy});
        const auto optimizer = optim::sgd(engine->optimizer_params(), {.lr = kCornerRate});
        for (int64_t step = 0; step < kSteps; ++step) {
          engine->backward(loss_of(net, step, mesh));
          EXPECT_GT(engine->clip_grad_norm(1e9), 0.0);
          engine->step(*optimizer);
        }
        expect_close(weights_of(*engine), wanted, policy);
      });
    }
  }
}

}  // namespace
}  // namespace trireme::test
