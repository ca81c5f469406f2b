// What others than the engine do to parameters: it counts, or is refused by name. And what the module has
// when the engine is gone.
#include <torch/nn/init.h>
#include <torch/serialize.h>

#include <sstream>

#include "tests/parallel/layouts.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;
using parallel::DataParallel;

constexpr at::ScalarType kDtypes[] = {at::kFloat, at::kBFloat16};

/// Calls body(layout, ranks, dtype, world) on every rank of every layout.
template <typename Body>
void on_every_layout(const Body& body) {
  at::set_num_threads(1);
  for (const at::ScalarType dtype : kDtypes) {
    for (const int64_t ranks : {1, 2, 3}) {
      for (const Layout& layout : layouts(ranks)) {
        run_ranks(ranks, [&](std::shared_ptr<World> world) {
          body(layout, dtype, std::move(world), layout.label(ranks, dtype));
        });
      }
    }
  }
}

/// Values for parameter `name` that a test writes, which bf16 has exactly.
at::Tensor written(const std::string& name, at::IntArrayRef shape) {
  return (random(name.size() + 7 * static_cast<uint64_t>(name.back()), shape, 0.3) * 64).round() / 64;
}

Weights written(const Weights& like) {
  Weights values;
  for (const auto& [name, weight] : like) values[name] = written(name, weight.sizes());
  return values;
}

using Way = std::function<void(at::Tensor param, const at::Tensor& values)>;

/// What training makes of `start`, from the first step on.
Weights trained_from(const Weights& start, const Layout& layout, const comm::Mesh& mesh,
                     at::ScalarType dtype) {
  Net net(1);
  {
    const at::NoGradGuard no_grad;
    for (auto& [name, param] : parameters_of(net)) at::Tensor(param).copy_(start.at(name));
  }
  const auto engine = wrap_as(net, mesh, layout, dtype);
  const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
  train_steps(net, *engine, *optimizer, 0, 2);
  return weights_of(*engine);
}

/// `way` writes to all parameters after a first step: they are the masters, and training goes on from them.
void expect_counts(const Layout& layout, at::ScalarType dtype, const std::shared_ptr<World>& world,
                   const Way& way, const std::string& what) {
  const comm::Mesh mesh = mesh_of(world, layout);
  Net net(7);
  const auto engine = wrap_as(net, mesh, layout, dtype);
  const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
  train_steps(net, *engine, *optimizer, 0, 1);
  const Weights values = written(weights_of(*engine));
  for (auto& [name, param] : parameters_of(net)) way(param, values.at(name));
  expect_equal(weights_of(*engine), values, what);
  train_steps(net, *engine, *optimizer, 0, 2);
  expect_equal(weights_of(*engine), trained_from(values, layout, mesh, dtype), what + ", trained");
}

TEST(ForeignWrites, InPlaceCountUnderEveryPolicy) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        expect_counts(
            layout, dtype, world,
            [](at::Tensor param, const at::Tensor& values) {
              const at::NoGradGuard no_grad;
              param.copy_(values);
            },
            what + ", copy_");
        expect_counts(
            layout, dtype, world,
            [](const at::Tensor& param, const at::Tensor& values) {
              for (int64_t row = 0; row < values.size(0); ++row) param.detach()[row].copy_(values[row]);
            },
            what + ", rows of detach()");
      });
}

TEST(ForeignWrites, ThroughDataCountWhereOperatorsAreSeenAndInFp32) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        if (dtype != at::kFloat && !plan::find_policy(layout.policy).shard_parameters) return;
        expect_counts(
            layout, dtype, world,
            [](const at::Tensor& param, const at::Tensor& values) { param.data().copy_(values); },
            what + ", data()");
      });
}

TEST(ForeignWrites, LeaveTheMastersOfOtherParametersAsTheyAre) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7);
        const auto engine = wrap_as(net, mesh, layout, dtype);
        const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
        train_steps(net, *engine, *optimizer, 0, 2);
        Weights wanted = weights_of(*engine);
        {
          const at::NoGradGuard no_grad;
          net.blocks[1]->b1.fill_(0.25);
          torch::nn::init::constant_(net.head, -0.5);
        }
        wanted["blocks.1.b1"] = at::full({Net::kWidth}, 0.25);
        wanted["head"] = at::full({Net::kWidth, 3}, -0.5);
        expect_equal(weights_of(*engine), wanted, what);
      });
}

TEST(ForeignWrites, UnderHeldAreKept) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7);
        const auto engine = wrap_as(net, mesh, layout, dtype);
        const Weights values = written(weights_of(*engine));
        {
          const DataParallel::Held held(*engine);
          const at::NoGradGuard no_grad;
          for (auto& [name, param] : parameters_of(net)) at::Tensor(param).copy_(values.at(name));
        }
        expect_equal(weights_of(*engine), values, what);
        const DataParallel::Held held(*engine);
        for (auto& [name, param] : parameters_of(net))
          EXPECT_TRUE(at::equal(param.to(at::kFloat), values.at(name))) << what << ": " << name;
      });
}

TEST(ForeignWrites, BetweenBackwardAndStepAreUpdated) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        if (dtype != at::kFloat) return;
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7), same(7);
        const auto engine = wrap_as(net, mesh, layout), other = wrap_as(same, mesh, layout);
        const auto optimizer = optim::build(descent(0.05), engine->optimizer_params()),
                   other_optimizer = optim::build(descent(0.05), other->optimizer_params());
        train_steps(same, *other, *other_optimizer, 0, 1);
        backward_of(net, *engine, 0);
        {
          const at::NoGradGuard no_grad;
          for (auto& [name, param] : parameters_of(net)) at::Tensor(param).add_(1.0);
        }
        engine->step(*optimizer);
        Weights wanted = weights_of(*other);
        for (auto& [name, weight] : wanted) weight = weight + 1.0;
        const Weights got = weights_of(*engine);
        for (const auto& [name, weight] : wanted)
          EXPECT_TRUE(at::allclose(got.at(name), weight, 1e-6, 1e-6)) << what << ": " << name;
      });
}

TEST(ForeignWrites, ClampsAfterEachStepAreThoseOfAPlainLoop) {
  at::set_num_threads(1);
  const auto clamp = [](const torch::nn::Module& net) {
    const at::NoGradGuard no_grad;
    for (auto& [name, param] : parameters_of(net)) at::Tensor(param).clamp_(-0.2, 0.2);
  };
  Net plain(7);
  for (int64_t step = 0; step < kSteps; ++step) {
    plain.zero_grad();
    (loss_sum(plain, inputs(step), targets(step)) / static_cast<double>(kBatch)).backward();
    const at::NoGradGuard no_grad;
    for (auto& [name, param] : parameters_of(plain)) at::Tensor(param).sub_(param.grad() * 0.05);
    clamp(plain);
  }
  const Weights wanted = copies(parameters_of(plain));
  for (const int64_t ranks : {1, 2, 3}) {
    for (const Layout& layout : layouts(ranks)) {
      run_ranks(ranks, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7);
        const auto engine = wrap_as(net, mesh, layout);
        const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
        for (int64_t step = 0; step < kSteps; ++step) {
          train_steps(net, *engine, *optimizer, step, step + 1);
          clamp(net);
        }
        expect_close(weights_of(*engine), wanted, layout.label(ranks));
      });
    }
  }
}

/// What torch::save writes of a net with `values` in `dtype`.
std::string archive_of(const Weights& values, at::ScalarType dtype) {
  Net net(1);
  const at::NoGradGuard no_grad;
  for (auto& [name, param] : parameters_of(net)) at::Tensor(param).copy_(values.at(name));
  net.to(dtype);
  torch::serialize::OutputArchive archive;
  net.save(archive);
  std::ostringstream stream;
  archive.save_to(stream);
  return stream.str();
}

void read_archive(Net& net, const std::string& bytes) {
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  net.load(archive);
}

TEST(ForeignWrites, OfTorchLoadCount) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7);
        const auto engine = wrap_as(net, mesh, layout, dtype);
        const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
        train_steps(net, *engine, *optimizer, 0, 1);
        const Weights values = written(weights_of(*engine));
        read_archive(net, archive_of(values, dtype));
        train_steps(net, *engine, *optimizer, 0, 1);  // a forward pass before the engine looks
        read_archive(net, archive_of(values, dtype));
        expect_equal(weights_of(*engine), values, what);
        train_steps(net, *engine, *optimizer, 0, 2);
        expect_equal(weights_of(*engine), trained_from(values, layout, mesh, dtype), what + ", trained");
      });
}

/// Torch gives a parameter another node for its gradient with another dtype; the graph of the loss has the
/// old one.
TEST(ForeignWrites, OfTheSameValuesBetweenForwardAndBackwardChangeNothing) {
  for (const char* policy : {"ddp", "zero1", "zero2"}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      const auto train = [&](bool there_and_back) {
        Net net(7);
        const auto engine = wrap_as(net, mesh, Layout{policy});
        const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
        const auto rank = static_cast<size_t>(world->rank());
        for (int64_t step = 0; step < 3; ++step) {
          const at::Tensor loss = loss_sum(net, inputs(step).chunk(2)[rank], targets(step).chunk(2)[rank]);
          if (there_and_back) {
            net.to(at::kDouble);
            net.to(at::kFloat);
          }
          engine->backward(loss);
          engine->step(*optimizer);
        }
        return weights_of(*engine);
      };
      expect_equal(train(true), train(false), policy);
    });
  }
}

TEST(ForeignWrites, ThatChangeTheDtypeAreRefusedByName) {
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      Net net(7);
      const auto engine = wrap_as(net, mesh, Layout{policy});
      net.to(at::kDouble);
      expect_thrown<LogicError>([&] { weights_of(*engine); },
                                {"parameter ", "Double", "Float", "load_weights"});
      expect_thrown<LogicError>([&] { engine->take_writes(); }, {"Double"});
      const at::Tensor x = inputs(0).to(at::kDouble), y = targets(0).to(at::kDouble);
      expect_thrown<LogicError>([&] { engine->backward(loss_sum(net, x, y)); }, {"Double"});
    });
  }
}

TEST(ShardedModule, RefusesTorchSaveAndGivesItWhenHeld) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7);
        const auto engine = wrap_as(net, mesh, layout, dtype);
        const auto save = [&] {
          torch::serialize::OutputArchive archive;
          net.save(archive);
          std::ostringstream stream;
          archive.save_to(stream);
          return stream.str();
        };
        const bool sharded = plan::find_policy(layout.policy).shard_parameters && mesh.shard->size() > 1;
        if (sharded) expect_thrown([&] { save(); }, {"save_weights(engine, path)", "not gathered"}, what);
        Net copy(1);
        copy.to(dtype);
        {
          const DataParallel::Held held(*engine);
          read_archive(copy, save());
          expect_equal(copies(parameters_of(copy)), copies(parameters_of(net)), what);
        }
        Weights saved = copies(parameters_of(copy));
        for (auto& [name, weight] : saved) weight = weight.to(at::kFloat);
        const auto again = wrap_as(copy, mesh, layout, dtype);  // its parameters are parts of one storage
        expect_equal(weights_of(*again), saved, what + ", wrapped");
      });
}

TEST(ShardedModule, RefusesAccessToMemoryThatIsNotThere) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Net net(7);
    const auto engine = wrap_as(net, mesh, Layout{"fsdp"});
    expect_thrown([&] { net.blocks[2]->w1.data_ptr<float>(); }, {"blocks.2", "Held"});
    expect_thrown([&] { net.blocks[2]->w1.const_data_ptr<float>(); }, {"blocks.2", "Held"});
    const DataParallel::Held held(*engine);
    EXPECT_NE(net.blocks[2]->w1.data_ptr<float>(), nullptr);
  });
}

/// A step of plain torch.
void plain_step(Net& net) {
  net.zero_grad();
  loss_sum(net, inputs(0), targets(0)).backward();
  const at::NoGradGuard no_grad;
  for (auto& param : net.parameters()) param.sub_(param.grad() * 0.001);
}

TEST(EndOfAnEngine, GivesTheModuleItsParametersBack) {
  on_every_layout(
      [](const Layout& layout, at::ScalarType dtype, std::shared_ptr<World> world, const std::string& what) {
        const comm::Mesh mesh = mesh_of(world, layout);
        Net net(7), plain(1);
        at::Tensor kept;  // its graph outlives the engine
        Weights wanted;
        {
          const auto engine = wrap_as(net, mesh, layout, dtype);
          const auto optimizer = optim::build(descent(0.05), engine->optimizer_params());
          train_steps(net, *engine, *optimizer, 0, 2);
          kept = loss_sum(net, inputs(0).to(dtype), targets(0).to(dtype));
          wanted = weights_of(*engine);
        }
        for (const auto& [name, param] : parameters_of(net)) {
          EXPECT_EQ(param.scalar_type(), at::kFloat) << what;
          EXPECT_EQ(param.storage().nbytes(), param.nbytes()) << what;
          EXPECT_TRUE(param.requires_grad()) << what;
        }
        expect_equal(copies(parameters_of(net)), wanted, what);
        {
          const at::NoGradGuard no_grad;
          for (auto& [name, param] : parameters_of(plain)) at::Tensor(param).copy_(wanted.at(name));
        }
        plain_step(net);
        plain_step(plain);
        expect_equal(copies(parameters_of(net)), copies(parameters_of(plain)), what + ", a plain step");
        const auto again = wrap_as(net, mesh, layout, dtype);
        expect_equal(weights_of(*again), copies(parameters_of(plain)), what + ", wrapped again");
      });
}

TEST(EndOfAnEngine, ByAnExceptionNamesItselfWhereParametersAreUsed) {
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
    for (const at::ScalarType dtype : kDtypes) {
      run_ranks(2, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = mesh_of(world);
        Net net(7);
        const double began = monotonic_seconds();
        try {
          const auto engine = wrap_as(net, mesh, Layout{policy}, dtype);
          if (world->rank() == 0) throw std::runtime_error("a rank's own trouble");
          throw std::runtime_error("others");
        } catch (const std::runtime_error&) {
        }
        EXPECT_LT(monotonic_seconds() - began, 5.0);
        if (plan::find_policy(policy).shard_parameters) {
          expect_thrown([&] { net.blocks[1]->w1.sum(); }, {"blocks.1", "exception", "load_weights"}, policy);
          expect_thrown([&] { net.blocks[1]->w1.data_ptr(); }, {"blocks.1", "exception"}, policy);
        } else {
          EXPECT_TRUE(net.blocks[1]->w1.isfinite().all().item<bool>());
          plain_step(net);
        }
      });
    }
  }
}

}  // namespace
}  // namespace trireme
