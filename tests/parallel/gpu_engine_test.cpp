// The engine on one GPU: overlap, and a clip factor that never leaves the device, change no bit. Skipped
// without a GPU.
#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tests/support/engine_on_model.h"
#include "trireme/kernels/device.h"

namespace trireme::parallel {
namespace {

struct Run {
  std::string policy = "fsdp";
  bool overlap = true;
  bool clip_on_device = true;
  bool own_streams = false;  ///< built on one stream, trained on another
};

std::string digest_of(const Run& run) {
  plan::ModelConfig config;
  config.family = plan::ModelFamily::kLlama;
  config.n_layers = 4;
  config.d_model = 256;
  config.n_heads = 4;
  config.vocab_size = 4096;
  config = plan::complete(config, 128);
  const plan::ModelFacts facts = plan::describe(config, 128);
  const c10::Device device(c10::kCUDA, 0);
  const c10::impl::VirtualGuardImpl streams(device.type());
  c10::OptionalStreamGuard stream;
  if (run.own_streams) stream.reset_stream(streams.getStreamFromGlobalPool(device));
  const auto world =
      comm::World::join_store(c10::make_intrusive<c10d::HashStore>(), 0, 1, device, /*timeout_s=*/60.0);
  test::EngineOnModel trained(config, facts, world,
                              {.policy = plan::find_policy(run.policy),
                               .compute = at::kBFloat16,
                               .reduce = at::kBFloat16,
                               .device = device,
                               .overlap = run.overlap},
                              /*seed=*/3);
  if (run.own_streams) {
    kernels::synchronize_gpu();
    stream.reset_stream(streams.getStreamFromGlobalPool(device));
  }
  DataParallel& engine = trained.engine;
  const auto optimizer = optim::build({.lr = 1e-2}, engine.optimizer_params());
  for (int64_t step = 0; step < 12; ++step) {
    const at::Tensor tokens = (at::arange(8 * 129, at::kLong) * 7919 + step * 31)
                                  .remainder(config.vocab_size)
                                  .view({8, 129})
                                  .to(device);
    engine.backward(
        trained.model->loss(tokens.narrow(1, 0, 128).contiguous(), tokens.narrow(1, 1, 128).contiguous()));
    const at::Tensor norm = engine.grad_squares().sqrt();
    optim::GradScale scale;
    if (run.clip_on_device) {
      scale.device = optim::clip_factor(norm, 0.5);
    } else {
      scale.host = optim::clip_factor(norm.item<double>(), 0.5);
    }
    engine.step_scaled(*optimizer, scale);
    scale.device = at::Tensor();
    // What the caller lets go of may be given to others at once.
    for (int i = 0; i < 8; ++i) at::full({}, 7.0f, at::TensorOptions(device));
  }
  return weights_digest(engine);
}

TEST(GpuEngine, OverlapAndTheDeviceSideClipChangeNoBit) {
  if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  const std::string plain = digest_of({.policy = "ddp", .overlap = false, .clip_on_device = false});
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    for (const bool overlap : {false, true}) {
      for (const bool on_device : {false, true}) {
        EXPECT_EQ(digest_of({policy, overlap, on_device}), plain)
            << policy << " overlap " << overlap << " device clip " << on_device;
      }
    }
  }
}

TEST(GpuEngine, MayBeBuiltOnOneStreamAndUsedOnAnother) {
  if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  const std::string plain = digest_of({.policy = "ddp", .overlap = false});
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    for (const bool overlap : {false, true}) {
      EXPECT_EQ(digest_of({.policy = policy, .overlap = overlap, .own_streams = true}), plain)
          << policy << " overlap " << overlap;
    }
  }
}

}  // namespace
}  // namespace trireme::parallel
