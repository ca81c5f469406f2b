// The engine on two GPUs: over peer memory and over NCCL, under every policy, with a rank that shadows a
// batch, the weights have the same bits. One process a GPU; skipped with fewer than two GPUs.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "tests/comm/gpu_ranks.h"
#include "tests/parallel/plain_net.h"
#include "tests/support/engine_on_model.h"
#include "trireme/base/error.h"
#include "trireme/kernels/repeatable.h"
#include "trireme/parallel/storage.h"

namespace trireme::parallel {
namespace {

struct Setting {
  std::string policy;
  at::ScalarType compute = at::kFloat;
  int64_t accumulation = 1;
  bool overlap = true;
  bool peer_memory = true;
  plan::ModelFamily family =
      plan::ModelFamily::kMlp;  ///< others only where kernels must repeat their bits: attention else varies
  int64_t length = 64;
  bool evaluates = false;  ///< before each micro-batch, which changes nothing
};

std::string describe(const Setting& run) {
  return fmt::format("{} {} {} T {} accumulation {} overlap {} peer memory {} evaluates {}", run.family,
                     run.policy, c10::toString(run.compute), run.length, run.accumulation, run.overlap,
                     run.peer_memory, run.evaluates);
}

/// The loss of two batches that rank 0 alone has.
double evaluate(const test::EngineOnModel& trained, DataParallel& engine, const at::Tensor& tokens,
                int64_t rank, Keep keep) {
  const int64_t length = tokens.size(1) - 1;
  double sum = 0.0;
  int64_t batches = rank == 0 ? 2 : 0;
  auto evaluation = engine.evaluate(keep);
  for (; evaluation.next(batches > 0); --batches) {
    sum += trained.model
               ->loss(tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous())
               .item<double>();
  }
  return evaluation.mean(sum, rank == 0 ? 2.0 : 0.0);
}

/// Four steps; in the third, rank 1 has no data.
std::string train_and_digest(const Setting& run, const comm::Mesh& mesh) {
  plan::ModelConfig config;
  config.family = run.family;
  config.n_layers = 3;
  config.d_model = 192;
  config.vocab_size = 1000;
  config.n_heads = 3;
  const int64_t length = run.length;
  config = plan::complete(config, length);
  const plan::ModelFacts facts = plan::describe(config, length);
  const c10::Device device = mesh.world->device();
  const int64_t rank = mesh.world->rank(), ranks = mesh.world->size();
  test::EngineOnModel trained(config, facts, mesh,
                              {.policy = plan::find_policy(run.policy),
                               .compute = run.compute,
                               .reduce = run.compute,
                               .device = device,
                               .overlap = run.overlap},
                              /*seed=*/3);
  DataParallel& engine = trained.engine;
  const auto optimizer = optim::build({.lr = 1e-2}, engine.optimizer_params());
  for (int64_t step = 0; step < 4; ++step) {
    for (int64_t pass = 0; pass < run.accumulation; ++pass) {
      const bool last = pass + 1 == run.accumulation;
      if (step == 2 && rank == 1) {
        engine.shadow_micro_batch(last);
        continue;
      }
      const int64_t seed = (step * run.accumulation + pass) * ranks + rank;
      const at::Tensor tokens = (at::arange(4 * (length + 1), at::kLong) * 7919 + seed * 31)
                                    .remainder(config.vocab_size)
                                    .view({4, length + 1})
                                    .to(device);
      if (run.evaluates && step != 2) {  // rank 1 shadows the third step
        const double whole = evaluate(trained, engine, tokens, rank, Keep::kWhole);
        const double by_unit = evaluate(trained, engine, tokens, rank, Keep::kByUnit);
        TRIREME_CHECK(whole == by_unit, "evaluated whole {}, by unit {}", whole, by_unit);
      }
      const at::Tensor loss = trained.model->loss(tokens.narrow(1, 0, length).contiguous(),
                                                  tokens.narrow(1, 1, length).contiguous());
      last ? engine.backward(loss, 0.25) : engine.accumulate(loss, 0.25);
    }
    engine.step_scaled(*optimizer, optim::clip_factor(engine.grad_norm(), 0.5));
  }
  return weights_digest(engine);
}

/// Two ranks, joined once for all settings of a transport, since joining takes NCCL a second.
class Meshes {
 public:
  Meshes() : ports_{test::free_port(), test::free_port()} {}
  const comm::Mesh& of(int64_t rank, bool peer_memory) {
    std::optional<comm::Mesh>& mesh = meshes_[peer_memory];
    if (!mesh) {
      const auto world = test::join_gpus(rank, 2, ports_[peer_memory], 60.0, {.share = peer_memory});
      mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 2));
    }
    return *mesh;
  }

 private:
  std::array<int64_t, 2> ports_;  ///< chosen before the ranks fork
  std::array<std::optional<comm::Mesh>, 2> meshes_;
};

TEST(GpuRanks, EveryPolicyAndTransportGivesTheSameBits) {
  if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
  std::vector<Setting> runs;
  for (const auto compute : {at::kFloat, at::kBFloat16}) {
    for (const int64_t accumulation : {1, 2}) {
      for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
        for (const bool overlap : {true, false}) {
          for (const bool peer_memory : {true, false}) {
            runs.push_back({policy, compute, accumulation, overlap, peer_memory});
            runs.back().evaluates = accumulation == 2;
          }
        }
      }
    }
  }
  for (const char* policy : {"zero2", "fsdp"})
    runs.push_back({.policy = policy, .accumulation = 2});  // without evaluation
  Meshes meshes;
  const auto body = [&](int64_t rank) {
    test::Expectations expect;
    std::map<std::pair<at::ScalarType, int64_t>, std::string> wanted;
    for (const Setting& run : runs) {
      const std::string digest = train_and_digest(run, meshes.of(rank, run.peer_memory));
      const auto [first, is_new] = wanted.try_emplace({run.compute, run.accumulation}, digest);
      expect.is_true(first->second == digest, describe(run));
    }
    return expect.code();
  };
  EXPECT_EQ(test::fork_ranks(2, body, 240.0), (std::vector<int>{0, 0}));
}

/// Each setting twice, on two ranks: all digests of a group of settings must be one.
void expect_one_digest_each(const std::vector<std::vector<Setting>>& groups) {
  Meshes meshes;
  const auto body = [&](int64_t rank) {
    const kernels::Repeatable repeatable(true);
    test::Expectations expect;
    for (const std::vector<Setting>& runs : groups) {
      std::string wanted;
      for (const Setting& run : runs) {
        for (int again = 0; again < 2; ++again) {
          const std::string digest = train_and_digest(run, meshes.of(rank, run.peer_memory));
          if (wanted.empty()) wanted = digest;
          expect.is_true(digest == wanted, describe(run));
        }
      }
    }
    return expect.code();
  };
  EXPECT_EQ(test::fork_ranks(2, body, 120.0), (std::vector<int>{0, 0}));
}

TEST(GpuRanks, EveryPolicyGivesTheSameBitsOfLongSequencesWhereKernelsMustRepeatThem) {
  if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
  std::vector<Setting> long_bf16, short_fp32;
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
    for (const bool overlap : {true, false}) {
      long_bf16.push_back({.policy = policy,
                           .compute = at::kBFloat16,
                           .overlap = overlap,
                           .family = plan::ModelFamily::kLlama,
                           .length = 4096});
    }
    short_fp32.push_back({.policy = policy, .family = plan::ModelFamily::kGpt2, .length = 250});
  }
  expect_one_digest_each({long_bf16, short_fp32});
}

/// A module of one's own under torch's AdamW: micro-batches of 5 and 1 rows, clipped, the optimizer's own
/// step() or the engine's.
std::string train_own_module(const comm::Mesh& mesh, const char* policy, at::ScalarType compute,
                             bool by_engine) {
  test::Net net(7 + static_cast<uint64_t>(mesh.dp_rank));
  const auto engine =
      test::wrap(net, mesh, {.policy = policy, .bucket_mib = 0.0005, .compute = compute, .reduce = compute});
  torch::optim::AdamW optimizer(engine->optimizer_tensors(), torch::optim::AdamWOptions(0.02).eps(1e-2));
  const c10::Device device = mesh.world->device();
  const int64_t first = mesh.dp_rank * test::kBatch / 2;
  for (int64_t step = 0; step < test::kSteps; ++step) {
    const at::Tensor x = test::inputs(step).to(device, compute), y = test::targets(step).to(device, compute);
    engine->accumulate(test::loss_sum(net, x.narrow(0, first, 5), y.narrow(0, first, 5)) / 5.0, 5.0);
    engine->backward(test::loss_sum(net, x.narrow(0, first + 5, 1), y.narrow(0, first + 5, 1)));
    engine->clip_grad_norm(0.5);
    if (by_engine) {
      engine->step(optimizer);
    } else {
      optimizer.step();
    }
  }
  return weights_digest(*engine);
}

TEST(GpuRanks, TorchsOptimizersTrainOnesOwnModuleToTheSameBitsUnderEveryPolicy) {
  if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
  Meshes meshes;
  const auto body = [&](int64_t rank) {
    test::Expectations expect;
    for (const auto compute : {at::kFloat, at::kBFloat16}) {
      std::string wanted;
      for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
        for (const bool by_engine : {true, false}) {
          const std::string digest = train_own_module(meshes.of(rank, true), policy, compute, by_engine);
          if (wanted.empty()) wanted = digest;
          expect.is_true(digest == wanted,
                         fmt::format("{} {} by engine {}", policy, c10::toString(compute), by_engine));
        }
      }
    }
    return expect.code();
  };
  EXPECT_EQ(test::fork_ranks(2, body, 120.0), (std::vector<int>{0, 0}));
}

/// One parameter that takes long to gather.
struct Wide : torch::nn::Module {
  explicit Wide(const c10::Device& device) {
    rows = register_parameter("rows", at::full({kRows, 1024}, 3.0, at::TensorOptions(device)));
  }
  static constexpr int64_t kRows = 256 * 1024;
  at::Tensor rows;
};

TEST(GpuRanks, AModuleThatAnnouncesNothingFindsItsBucketsGatheredFromTheBeginning) {
  if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
  Meshes meshes;
  const auto body = [&](int64_t rank) {
    test::Expectations expect;
    for (const char* policy : {"zero1", "zero2"}) {
      const comm::Mesh& mesh = meshes.of(rank, true);
      Wide module(mesh.world->device());
      const auto engine = data_parallel(module, mesh, {.policy = policy});
      const at::NoGradGuard no_grad;
      const at::Tensor of_others = module.rows.select(0, rank == 0 ? Wide::kRows - 1 : 0).clone();
      expect.is_true(of_others.eq(3.0).all().item<bool>(), policy);
    }
    return expect.code();
  };
  EXPECT_EQ(test::fork_ranks(2, body, 120.0), (std::vector<int>{0, 0}));
}

bool is_gathered(nn::LanguageModel& model, const plan::UnitSpec& unit) {
  return has_storage(model.named_parameters()[unit.params.front().name]);
}

/// Three steps of fsdp; in the last two every block must find as many of the following ones gathered as
/// `prefetch` says.
std::string train_ahead(int64_t prefetch, const comm::Mesh& mesh, test::Expectations& expect) {
  const c10::Device device = mesh.world->device();
  const plan::ModelConfig config = plan::complete(
      {.family = plan::ModelFamily::kMlp, .n_layers = 5, .d_model = 64, .vocab_size = 256}, 32);
  const plan::ModelFacts facts = plan::describe(config, 32);
  test::EngineOnModel trained(
      config, facts, mesh,
      {.policy = plan::find_policy(plan::PolicyName::kFsdp), .device = device, .prefetch = prefetch},
      /*seed=*/3);
  int64_t step = 0;
  const auto check_ahead = [&](const std::string& name) {
    const auto unit = std::ranges::find(facts.units, name, &plan::UnitSpec::name);
    const auto gathered = std::count_if(unit + 1, facts.units.end(), [&](const plan::UnitSpec& later) {
      return is_gathered(*trained.model, later);
    });
    const int64_t wanted = std::min<int64_t>(prefetch, facts.units.end() - unit - 1);
    expect.is_true(step == 0 || gathered == wanted,
                   fmt::format("prefetch {}, step {}, {}: {} units ahead, not {}", prefetch, step, name,
                               gathered, wanted));
  };
  trained.model->set_unit_runner(
      [&, inner = trained.model->unit_runner()](const nn::Unit& unit, const at::Tensor& x, bool begins_pass) {
        nn::Unit checked = unit;
        checked.forward = [&check_ahead, unit](const at::Tensor& in) {
          check_ahead(unit.name);
          return unit.forward(in);
        };
        return inner(checked, x, begins_pass);
      });
  const auto optimizer = optim::build({.lr = 1e-2}, trained.engine.optimizer_params());
  for (; step < 3; ++step) {
    const at::Tensor tokens = (at::arange(4 * 33, at::kLong) * 7919 + step * 31 + mesh.world->rank())
                                  .remainder(config.vocab_size)
                                  .view({4, 33})
                                  .to(device);
    const at::Tensor loss =
        trained.model->loss(tokens.narrow(1, 0, 32).contiguous(), tokens.narrow(1, 1, 32).contiguous());
    trained.engine.backward(loss, 0.5);
    trained.engine.step_scaled(*optimizer, optim::clip_factor(trained.engine.grad_norm(), 0.5));
  }
  return weights_digest(trained.engine);
}

TEST(GpuRanks, UnitsAreGatheredAsFarAheadAsAskedWhichChangesNoBit) {
  if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
  const std::vector<int64_t> depths = {0, 1, 2, 9};
  Meshes meshes;
  const auto body = [&](int64_t rank) {
    test::Expectations expect;
    std::string wanted;
    for (const int64_t depth : depths) {
      const std::string digest = train_ahead(depth, meshes.of(rank, true), expect);
      if (wanted.empty()) wanted = digest;
      expect.is_true(digest == wanted, fmt::format("prefetch {} gives the bits of prefetch 0", depth));
    }
    return expect.code();
  };
  EXPECT_EQ(test::fork_ranks(2, body, 120.0), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace trireme::parallel
