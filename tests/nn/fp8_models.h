#pragma once
// Loss and gradients of small models in FP8, on a CPU or a GPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "tests/support/relative_error.h"
#include "trireme/nn/deferred_gradients.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {

using Gradients = std::map<std::string, at::Tensor>;

struct Fp8Pass {
  double loss = 0.0;
  Gradients gradients;
};

struct Fp8Setting {
  plan::ModelFamily family = plan::ModelFamily::kLlama;
  std::optional<Fp8Recipe> recipe = {};
  std::function<bool(int64_t)> blocks = [](int64_t) { return true; };
  bool cheap = false, defers = false, lends = false, trains = true;
  bool head = false;     ///< in FP8 as well
  bool delayed = false;  ///< scaled by the magnitudes of the same step before
  int64_t micro_batches = 1;
  at::Device device = at::kCPU;
};

/// The sum of the losses of all micro-batches, with gradients that begin anew.
inline double fp8_step(Model& model, const Fp8Setting& setting) {
  for (const auto& entry : model.named_parameters()) {
    at::Tensor param = entry.value();
    param.mutable_grad() = at::Tensor();
    if (setting.lends) lend_gradient(param, at::full_like(param, std::nan("")));
  }
  double sum = 0.0;
  for (int64_t i = 0; i < setting.micro_batches; ++i) {
    const at::Tensor tokens =
        (at::arange(2 * 65, at::TensorOptions().dtype(at::kLong).device(setting.device)) * 7919 + 31 * i)
            .remainder(101)
            .view({2, 65});
    const at::Tensor loss =
        model.loss(tokens.narrow(1, 0, 64).contiguous(), tokens.narrow(1, 1, 64).contiguous());
    sum += loss.item<double>();
    DeferredGradients later;
    if (setting.defers) {
      const DeferredGradients::Scope scope(later);
      loss.backward();
    } else {
      loss.backward();
    }
    EXPECT_EQ(later.count(), setting.defers ? 3 * 4 : 0);
    later.run();
  }
  return sum;
}

inline Fp8Pass pass_of(const Fp8Setting& setting) {
  plan::ModelConfig config;
  config.family = setting.family;
  config.n_layers = 3;
  config.d_model = 128;
  config.n_heads = 2;
  config.n_kv_heads = 2;
  config.d_ff = 256;
  config.vocab_size = 101;
  config = plan::complete(config, 64);
  const auto model = build(config);
  const InitialWeights initial(config, 3);
  for (const auto& entry : model->named_parameters()) {
    at::Tensor param = entry.value(), values = at::empty({param.numel()});
    initial(entry.key(), plan::Region::whole(param.sizes().vec()), values);
    param.set_data(values.view(param.sizes()).to(setting.device, at::kBFloat16));
  }
  if (!setting.trains) model->eval();
  model->recompute_cheap(setting.cheap ? 1 : 0);
  Fp8History history(config.n_layers, 4, setting.device);
  if (setting.recipe) {
    model->use_fp8(*setting.recipe, setting.blocks, setting.delayed ? &history : nullptr, setting.head);
  }
  if (setting.delayed) {
    fp8_step(*model, setting);
    history.end_step();
  }
  Fp8Pass pass{.loss = fp8_step(*model, setting), .gradients = {}};
  for (const auto& entry : model->named_parameters()) pass.gradients[entry.key()] = entry.value().grad();
  return pass;
}

inline void expect_same_bits(const Fp8Pass& got, const Fp8Pass& wanted, const std::string& what) {
  EXPECT_EQ(got.loss, wanted.loss) << what;
  for (const auto& [name, gradient] : wanted.gradients) {
    EXPECT_TRUE(at::equal(got.gradients.at(name), gradient)) << what << ": " << name;
  }
}

}  // namespace trireme::nn
