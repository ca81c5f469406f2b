// The engine on two GPUs: over peer memory and over NCCL, under every policy, with a rank that shadows a
// batch, the weights have the same bits. One process a GPU; skipped with fewer than two GPUs.
#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "tests/comm/gpu_ranks.h"
#include "tests/support/engine_on_model.h"
#include "trireme/kernels/repeatable.h"

namespace trireme::parallel {
namespace {

struct Setting {
  std::string policy;
  at::ScalarType compute = at::kFloat;
  int64_t accumulation = 1;
  bool overlap = true;
  bool peer_memory = true;
  std::string family = "mlp";  ///< others only where kernels must repeat their bits: attention else varies
  int64_t length = 64;
};

std::string describe(const Setting& run) {
  return fmt::format("{} {} {} T {} accumulation {} overlap {} peer memory {}", run.family, run.policy,
                     c10::toString(run.compute), run.length, run.accumulation, run.overlap, run.peer_memory);
}

/// Four steps; in the third, rank 1 has no data.
std::string train(const Setting& run, const comm::Mesh& mesh) {
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
      engine.begin_forward();
      engine.backward(trained.model->loss(tokens.narrow(1, 0, length).contiguous(),
                                          tokens.narrow(1, 1, length).contiguous()),
                      0.25, last);
    }
    engine.step(*optimizer, 1e-2, optim::clip_factor(engine.grad_norm(), 0.5));
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
          }
        }
      }
    }
  }
  Meshes meshes;
  const auto body = [&](int64_t rank) {
    test::Expectations expect;
    std::map<std::pair<at::ScalarType, int64_t>, std::string> wanted;
    for (const Setting& run : runs) {
      const std::string digest = train(run, meshes.of(rank, run.peer_memory));
      const auto [first, is_new] = wanted.try_emplace({run.compute, run.accumulation}, digest);
      expect.is_true(first->second == digest, describe(run));
    }
    return expect.code();
  };
  EXPECT_EQ(test::fork_ranks(2, body, 240.0), (std::vector<int>{0, 0}));
}

/// Each setting twice, on two ranks: all digests must be one.
void expect_one_digest(const std::vector<Setting>& runs) {
  Meshes meshes;
  const auto body = [&](int64_t rank) {
    const kernels::Repeatable repeatable(true);
    test::Expectations expect;
    std::string wanted;
    for (const Setting& run : runs) {
      for (int again = 0; again < 2; ++again) {
        const std::string digest = train(run, meshes.of(rank, run.peer_memory));
        if (wanted.empty()) wanted = digest;
        expect.is_true(digest == wanted, describe(run));
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
                           .family = "llama",
                           .length = 4096});
    }
    short_fp32.push_back({.policy = policy, .family = "gpt2", .length = 250});
  }
  expect_one_digest(long_bf16);
  expect_one_digest(short_fp32);
}

}  // namespace
}  // namespace trireme::parallel
