#pragma once
// Runs of models of images in stages beside those of the model in one piece.
#include <fmt/format.h>

#include <map>
#include <string>
#include <vector>

#include "tests/train/image_fixture.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme::train {

class StagedImages : public ImageRuns {
 protected:
  void SetUp() override {
    ImageRuns::SetUp();
    write_split("train", 48);  // whole steps, which are the same in stages and without
    config_.train = {.epochs = 1, .global_batch = 8, .micro_batch = 2, .val_every = 3, .val_batches = 100};
  }

  struct Outcome {
    Recorder recorder;
    std::vector<std::string> guesses;
    std::map<std::string, at::Tensor> tensors;  ///< of the file of weights
  };
  Outcome outcome(int64_t pp, int64_t dp = 1) {
    config_.parallel.pp = pp;
    train_on(pp * dp);
    return recorded();
  }

  /// Of the run that is over.
  Outcome recorded() {
    Outcome made{recorder_, {}, {}};
    for (const Classification& guessed : guessed_) made.guesses.push_back(counted(guessed));
    const checkpoint::SafetensorsReader file(options().weights_path);
    for (const auto& [name, info] : file.tensors()) made.tensors[name] = file.read(name);
    return made;
  }

  static void expect_near(const Outcome& got, const Outcome& wanted) {
    ASSERT_EQ(got.recorder.steps.size(), wanted.recorder.steps.size());
    for (size_t i = 0; i < wanted.recorder.steps.size(); ++i) {
      const StepRecord &a = got.recorder.steps[i], &b = wanted.recorder.steps[i];
      SCOPED_TRACE(fmt::format("step {}", b.step));
      EXPECT_NEAR(a.loss, b.loss, 2e-6 * b.loss);
      EXPECT_NEAR(a.grad_norm, b.grad_norm, 2e-5 * b.grad_norm);
      EXPECT_EQ(a.tokens, b.tokens);
      EXPECT_EQ(a.val_top1, b.val_top1);
      EXPECT_EQ(a.val_top5, b.val_top5);
      ASSERT_EQ(a.val_loss.has_value(), b.val_loss.has_value());
      if (b.val_loss) {
        EXPECT_NEAR(*a.val_loss, *b.val_loss, 1e-5 * *b.val_loss);
      }
    }
    EXPECT_EQ(got.guesses, wanted.guesses);
    ASSERT_EQ(got.tensors.size(), wanted.tensors.size());
    for (const auto& [name, tensor] : wanted.tensors) {
      ASSERT_TRUE(got.tensors.contains(name)) << name;
      const at::Tensor& mine = got.tensors.at(name);
      ASSERT_EQ(mine.scalar_type(), tensor.scalar_type()) << name;
      const double size = tensor.to(at::kDouble).norm().item<double>();
      EXPECT_LE((mine.to(at::kDouble) - tensor.to(at::kDouble)).norm().item<double>(), 2e-5 * size + 1e-6)
          << name;
    }
  }
};

}  // namespace trireme::train
