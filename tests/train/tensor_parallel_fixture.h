#pragma once
// A run on meshes with tp and cp, beside that of one process.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "tests/train/resume_fixture.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme::train {

struct Trained {
  std::vector<double> losses, norms;
  double val_loss = 0.0;
  std::string digest, sample;
  std::map<std::string, at::Tensor> weights;
  int64_t sent = 0, predicted = 0;  ///< bytes of a full step
};

/// Relative, over the weights of all parameters together.
inline double weight_distance(const Trained& one, const Trained& other) {
  double difference = 0.0, size = 0.0;
  for (const auto& [name, weight] : one.weights) {
    difference += (weight - other.weights.at(name)).to(at::kDouble).square().sum().item<double>();
    size += weight.to(at::kDouble).square().sum().item<double>();
  }
  return std::sqrt(difference / size);
}

class TensorParallel : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    config_.model.vocab_size = 257;  // no number of ranks divides it
    config_.model.n_heads = config_.model.n_kv_heads = 4;
    config_.model.d_ff = 56;
    config_.train.steps = 5;
    config_.train.global_batch = 8;
    config_.train.micro_batch = 0;
    config_.train.grad_clip = 0.5;  // it bites
    config_.train.val_every = 5;
    config_.train.sample_tokens = 4;
    config_.checkpoint.every = 0;
  }

  void use_llama() {
    config_.model.family = plan::ModelFamily::kLlama;
    config_.model.n_kv_heads = 2;  // two ranks of four have the same
    config_.model.tie_embeddings = false;
  }

  Trained train_on(int64_t ranks, bool resume = false) {
    const TrainResult result = Resume::run(ranks, resume);
    Trained trained;
    for (const StepRecord& step : recorder_.steps) {
      trained.losses.push_back(step.loss);
      trained.norms.push_back(step.grad_norm);
    }
    trained.val_loss = result.summary.final_val_loss.value_or(0.0);
    trained.digest = result.summary.weights_digest;
    trained.sample = result.summary.sample;
    const checkpoint::SafetensorsReader file((folder_ / "weights.safetensors").string());
    for (const auto& [name, info] : file.tensors()) trained.weights[name] = file.read(name);
    trained.sent = result.summary.cost.measured_wire_bytes;
    trained.predicted = result.summary.cost.predicted_wire_bytes.value_or(-1);
    return trained;
  }

  void expect_alike(const Trained& got, const Trained& wanted, const std::string& what) {
    ASSERT_EQ(got.losses.size(), wanted.losses.size()) << what;
    for (size_t step = 0; step < got.losses.size(); ++step) {
      EXPECT_NEAR(got.losses[step], wanted.losses[step], 1e-5 * wanted.losses[step]) << what;
      EXPECT_NEAR(got.norms[step], wanted.norms[step], 1e-5 * wanted.norms[step]) << what;
    }
    EXPECT_NEAR(got.val_loss, wanted.val_loss, 1e-5 * wanted.val_loss) << what;
    EXPECT_EQ(got.sample, wanted.sample) << what;
    EXPECT_LE(weight_distance(got, wanted), 1e-4) << what;
    EXPECT_GT(weight_distance(got, wanted), 0.0) << what << ": nothing was split";
    EXPECT_EQ(got.sent, got.predicted) << what;
  }

  void on(int64_t pp, int64_t dp_replicate, int64_t tp, int64_t cp = 1) {
    config_.parallel.pp = pp;
    config_.parallel.dp_replicate = dp_replicate;
    config_.parallel.tp = tp;
    config_.parallel.cp = cp;
  }
};

}  // namespace trireme::train
