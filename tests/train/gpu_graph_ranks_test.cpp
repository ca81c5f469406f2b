// Passes of two ranks launched as CUDA graphs, with their reductions beside the launch, change no bit of any
// step. One process a GPU; skipped with fewer than two GPUs.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "tests/comm/gpu_ranks.h"
#include "tests/support/engine_on_model.h"
#include "trireme/plan/memory.h"
#include "trireme/train/passes.h"

namespace trireme::train {
namespace {

/// What two ranks train.
struct Setting {
  const char* policy;
  at::ScalarType compute = at::kBFloat16;
  int64_t accumulation = 1;
  bool overlap = true, peer_memory = true;
};

struct Trained {
  std::string digest;
  int64_t recorded;
  bool holds_what_is_planned;
};

/// Ten steps of two ranks. In the eighth rank 1 has fewer rows, so that it runs a pass that rank 0 launches;
/// the ninth is skipped.
Trained train_ranks(const Setting& run, const comm::Mesh& mesh, bool records) {
  constexpr int64_t kRows = 4, kLength = 32;
  plan::ModelConfig config;
  config.family = plan::ModelFamily::kMlp;
  config.n_layers = 3;
  config.d_model = 192;
  config.vocab_size = 1000;
  config = plan::complete(config, kLength);
  const c10::Device device = mesh.world->device();
  const c10::StreamGuard guard(parallel::recording_stream(device));
  test::EngineOnModel trained(config, plan::describe(config, kLength), mesh,
                              {.policy = plan::find_policy(run.policy),
                               .compute = run.compute,
                               .reduce = run.compute,
                               .device = device,
                               .overlap = run.overlap},
                              /*seed=*/3);
  parallel::DataParallel& engine = trained.engine;
  const auto optimizer = optim::build({.lr = 1e-2}, engine.optimizer_params());
  Passes passes(*trained.model, engine, device,
                {.accumulation = run.accumulation,
                 .rows = kRows,
                 .step_rows = 2 * kRows * run.accumulation,
                 .make_recording = records ? parallel::recordings() : parallel::RecordingMaker()});
  for (int64_t step = 0; step < 10; ++step) {
    int64_t index = 0;
    const auto next = [&] {
      const int64_t seed = 2 * (step * run.accumulation + index++) + mesh.world->rank();
      const int64_t rows = step == 7 && mesh.world->rank() == 1 ? kRows - 1 : kRows;
      const at::Tensor tokens = (at::arange(rows * (kLength + 1), at::kLong) * 7919 + seed * 31)
                                    .remainder(config.vocab_size)
                                    .view({rows, kLength + 1});
      return data::Batch{.inputs = tokens.narrow(1, 0, kLength).contiguous(),
                         .targets = tokens.narrow(1, 1, kLength).contiguous(),
                         .rows = rows,
                         .step_rows = 2 * kRows * run.accumulation};
    };
    passes.run(next, 1.0);
    if (step == 8) {
      engine.skip_step();
      continue;
    }
    engine.step_scaled(*optimizer, optim::clip_factor(engine.grad_norm(), 0.5));
  }
  const plan::StateBytes held = engine.state_bytes(), planned = plan::state_bytes(engine.program());
  const bool as_planned = held.parameters == planned.parameters && held.gradients == planned.gradients;
  return {parallel::weights_digest(engine), passes.recorded(), as_planned};
}

TEST(GpuGraphRanks, ChangeNoBitUnderAnyPolicyAndTransport) {
  if (test::count_gpus() < 2) GTEST_SKIP() << "two GPUs are needed";
  const std::array<int64_t, 2> ports = {test::free_port(), test::free_port()};
  const auto body = [&](int64_t rank) {
    test::Expectations expect;
    for (const bool peer_memory : {true, false}) {
      const auto world = test::join_gpus(rank, 2, ports[peer_memory], 60.0, {.share = peer_memory});
      const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 2));
      for (const auto compute : {at::kBFloat16, at::kFloat}) {
        for (const int64_t accumulation : {1, 3}) {
          for (const char* policy : {"ddp", "zero1", "zero2", "fsdp"}) {
            for (const bool overlap : {true, false}) {
              const Setting run{policy, compute, accumulation, overlap, peer_memory};
              const std::string text =
                  fmt::format("{} {} accumulation {} overlap {} peer memory {}", policy,
                              c10::toString(compute), accumulation, overlap, peer_memory);
              const Trained live = train_ranks(run, mesh, /*records=*/false),
                            launched = train_ranks(run, mesh, /*records=*/true);
              expect.is_true(launched.digest == live.digest, text);
              expect.is_true(launched.recorded == accumulation, text + ": all passes are recorded");
              expect.is_true(launched.holds_what_is_planned, text + ": memory is as the program says");
            }
          }
        }
      }
    }
    return expect.code();
  };
  EXPECT_EQ(test::fork_ranks(2, body, 240.0), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace trireme::train
