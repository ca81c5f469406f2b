// Whole models on a GPU against the same models on the CPU: losses and every gradient, with chunks of logits,
// and the same bits when repeated. Skipped without a GPU.
#include <ATen/ATen.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>

#include "trireme/kernels/device.h"
#include "trireme/memory/recompute.h"
#include "trireme/nn/deferred_gradients.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/presets.h"

namespace trireme::nn {
namespace {

plan::ModelConfig small(plan::ModelFamily family) {
  plan::ModelConfig config;
  config.family = family;
  config.n_layers = 2;
  config.d_model = 128;
  config.n_heads = 4;
  config.n_kv_heads = family == plan::ModelFamily::kLlama ? 2 : 4;
  config.d_ff = 256;
  config.vocab_size = 1003;  // no multiple of anything
  config.max_seq_len = 96;
  config.tie_embeddings = family == plan::ModelFamily::kGpt2;
  return config;
}

struct Derivatives {
  double loss = 0.0;
  std::map<std::string, at::Tensor> grads;
};

/// How backward is done.
struct Halves {
  bool defers = false;  ///< gradients of weights
  plan::Recompute recompute = plan::Recompute::kNone;
};

void set_recompute(LanguageModel& model, plan::Recompute recompute) {
  if (recompute == plan::Recompute::kCheap) model.recompute_cheap(1);
  if (recompute == plan::Recompute::kBlock) {
    model.set_unit_runner([](const Unit& unit, const at::Tensor& x, bool begins_pass) {
      return begins_pass ? unit.forward(x) : memory::recomputed(x, unit.forward);
    });
  }
}

/// `lends` gives the parameters memory for their gradients, as the engine does. Weights are rounded to
/// `weights` first.
Derivatives differentiate(const plan::ModelConfig& config, at::Device device, at::ScalarType dtype,
                          int64_t chunk_bytes, bool lends, at::ScalarType weights = at::kFloat,
                          const Halves& halves = {}) {
  const auto model = build(config);
  set_recompute(*model, halves.recompute);
  const InitialWeights initial(config, 7);
  for (const auto& entry : model->named_parameters()) {
    at::Tensor leaf = entry.value();
    at::Tensor values = at::empty({leaf.numel()});
    initial(entry.key(), plan::Region::whole(entry.value().sizes().vec()), values);
    leaf.set_data(values.view(leaf.sizes()).to(weights).to(device, dtype));
    if (lends) lend_gradient(leaf, at::full_like(leaf, std::nan("")));
  }
  const at::Tensor tokens =
      (at::arange(3 * 97, at::kLong) * 7919).remainder(config.vocab_size).view({3, 97}).to(device);
  // fp16 would lose gradients of probabilities of one in a thousand.
  const double scale = dtype == at::kHalf ? 4096.0 : 1.0;
  const at::Tensor loss = model->loss(tokens.narrow(1, 0, 96).contiguous(),
                                      tokens.narrow(1, 1, 96).contiguous(), chunk_bytes, scale);
  const at::Tensor gradient = at::full({}, scale / 3.0, loss.options());
  if (halves.defers) {
    DeferredGradients later;
    {
      const DeferredGradients::Scope scope(later);
      loss.backward(gradient);
    }
    EXPECT_GT(later.count(), 0) << "what autograd's own thread for the GPU has deferred";
    later.run();
  } else {
    loss.backward(gradient);
  }
  Derivatives result{loss.item<double>(), {}};
  for (const auto& entry : model->named_parameters()) {
    result.grads[entry.key()] = entry.value().grad().to(at::kCPU, at::kFloat) / scale;
  }
  return result;
}

class GpuModels : public testing::TestWithParam<plan::ModelFamily> {
 protected:
  void SetUp() override {
    if (kernels::gpus().empty()) GTEST_SKIP() << "no GPU";
  }
};

void expect_near(const Derivatives& got, const Derivatives& wanted, double loss_tolerance, double tolerance) {
  EXPECT_NEAR(got.loss, wanted.loss, loss_tolerance);
  for (const auto& [name, grad] : wanted.grads) {
    const double error = ((got.grads.at(name) - grad).norm() / grad.norm()).item<double>();
    EXPECT_LT(error, tolerance) << name;
  }
}

TEST_P(GpuModels, GiveTheLossAndGradientsOfTheCpu) {
  const plan::ModelConfig config = small(GetParam());
  const Derivatives cpu = differentiate(config, at::kCPU, at::kFloat, kLossChunkBytes, true);
  for (const bool lends : {true, false}) {
    const Derivatives fp32 = differentiate(config, at::kCUDA, at::kFloat, kLossChunkBytes, lends);
    expect_near(fp32, cpu, 1e-4, 2e-4);
  }
}

/// From the same weights, what is left is that activations and their gradients are rounded some forty times
/// on the way, each time by 0.3 of half a spacing (2^-9 in bf16, 2^-12 in fp16) in the mean: sqrt(40) times
/// that, and twice as much for queries and keys, whose gradients are differences.
TEST_P(GpuModels, RoundNoMoreThanTheirDtypeDoes) {
  const plan::ModelConfig config = small(GetParam());
  for (const auto& [dtype, spacing] : {std::pair(at::kBFloat16, 0x1.0p-8), {at::kHalf, 0x1.0p-11}}) {
    const Derivatives exact = differentiate(config, at::kCPU, at::kFloat, kLossChunkBytes, true, dtype);
    for (const bool lends : {true, false}) {
      SCOPED_TRACE(fmt::format("{} {}", c10::toString(dtype), lends));
      const Derivatives rounded = differentiate(config, at::kCUDA, dtype, kLossChunkBytes, lends, dtype);
      expect_near(rounded, exact, spacing, 4 * spacing);
    }
  }
}

TEST_P(GpuModels, GiveTheSameInPartsOfLogits) {
  const plan::ModelConfig config = small(GetParam());
  const Derivatives whole = differentiate(config, at::kCUDA, at::kFloat, kLossChunkBytes, true);
  const Derivatives parts = differentiate(config, at::kCUDA, at::kFloat, 64 * 1024 * 4, true);
  expect_near(parts, whole, 1e-5, 1e-5);
}

TEST_P(GpuModels, RepeatTheirBits) {
  const plan::ModelConfig config = small(GetParam());
  const Derivatives first = differentiate(config, at::kCUDA, at::kBFloat16, kLossChunkBytes, true);
  const Derivatives second = differentiate(config, at::kCUDA, at::kBFloat16, kLossChunkBytes, true);
  EXPECT_EQ(first.loss, second.loss);
  for (const auto& [name, grad] : first.grads) EXPECT_TRUE(at::equal(grad, second.grads.at(name))) << name;
}

TEST_P(GpuModels, GiveTheSameBitsWhenGradientsOfWeightsAreDeferred) {
  const plan::ModelConfig config = small(GetParam());
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    for (const plan::Recompute recompute : {plan::Recompute::kNone, plan::Recompute::kCheap}) {
      for (const bool lends : {true, false}) {
        const auto with = [&](bool defers) {
          return differentiate(config, at::kCUDA, dtype, kLossChunkBytes, lends, at::kFloat,
                               {defers, recompute});
        };
        const Derivatives whole = with(false), deferred = with(true);
        for (const auto& [name, grad] : whole.grads) {
          EXPECT_TRUE(at::equal(deferred.grads.at(name), grad))
              << name << " in " << c10::toString(dtype) << ", recompute " << plan::name(recompute);
        }
      }
    }
  }
}

TEST_P(GpuModels, GiveTheSameBitsWhateverIsComputedAgain) {
  const plan::ModelConfig config = small(GetParam());
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto with = [&](plan::Recompute recompute) {
      return differentiate(config, at::kCUDA, dtype, kLossChunkBytes, true, at::kFloat,
                           {.recompute = recompute});
    };
    const Derivatives wanted = with(plan::Recompute::kNone);
    for (const plan::Recompute recompute : {plan::Recompute::kCheap, plan::Recompute::kBlock}) {
      const Derivatives again = with(recompute);
      for (const auto& [name, grad] : wanted.grads) {
        EXPECT_TRUE(at::equal(again.grads.at(name), grad))
            << name << " in " << c10::toString(dtype) << ", recompute " << plan::name(recompute);
      }
    }
  }
}

/// Bytes that a forward pass leaves allocated, without those of the logits.
int64_t kept_bytes(const plan::ModelConfig& config, int64_t tokens, plan::Recompute recompute) {
  c10::cuda::CUDACachingAllocator::emptyCache();  // a block of an earlier test may be larger than what is
                                                  // asked
  const auto model = build(config);
  for (const auto& entry : model->named_parameters()) {
    at::Tensor leaf = entry.value();
    leaf.set_data(at::randn(entry.value().sizes()).mul_(0.02).to(at::kCUDA, at::kBFloat16));
  }
  set_recompute(*model, recompute);
  const at::Tensor inputs = at::zeros({1, tokens}, at::TensorOptions(at::kCUDA).dtype(at::kLong));
  model->forward(inputs);  // tables and workspaces
  // What was asked for: the allocator gives out whole free blocks that are little larger.
  const auto allocated = [] {
    const auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    return stats.requested_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)].current;
  };
  const int64_t before = allocated();
  const at::Tensor logits = model->forward(inputs);
  return allocated() - before - static_cast<int64_t>(logits.nbytes());
}

/// What the plan predicts for two more layers, so that what comes before and after the blocks does not count.
TEST_P(GpuModels, KeepWhatThePlanSays) {
  for (const plan::Recompute recompute :
       {plan::Recompute::kNone, plan::Recompute::kCheap, plan::Recompute::kBlock}) {
    plan::ModelConfig config = small(GetParam());
    config.d_model = 512;
    config.d_ff = 2048;
    config.max_seq_len = 4096;
    const plan::MemoryConfig memory{.recompute = recompute};
    const auto measured = [&](int64_t layers) {
      config.n_layers = layers;
      return kept_bytes(config, 4096, recompute);
    };
    const double difference = static_cast<double>(measured(4) - measured(2));
    config.n_layers = 2;
    const double predicted =
        4096 * plan::describe(config, 4096, {.compute = plan::Dtype::kBf16}, memory).saved_bytes_per_token;
    EXPECT_NEAR(difference / predicted, 1.0, 0.03) << plan::name(recompute);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GpuModels, testing::ValuesIn(plan::language_families()),
                         [](const auto& family) { return std::string(plan::name(family.param)); });

}  // namespace
}  // namespace trireme::nn
