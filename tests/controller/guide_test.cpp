// The programs of docs/guide/controller.md.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "examples/controller_mini_gpt/model.h"
#include "tests/controller/some_text.h"
#include "trireme/gt/capture.h"
#include "trireme/gt/dataset.h"
#include "trireme/gt/nn.h"
#include "trireme/gt/save.h"
#include "trireme/gt/signal.h"
#include "trireme/gt/workers.h"

namespace trireme {
namespace {

void one_product() {
  // snippet: program
  const gt::Workers workers =
      gt::gpu_workers(2, {.signals = "signals.yaml"});  // starts two, which end with it
  const gt::Tensor x = gt::randn({32, 16});
  gt::Tensor weight = gt::randn({16, 64}) * 0.02;
  weight.requires_grad_();
  gt::AdamW optimizer({weight}, 1e-3);
  {
    const gt::signal::context scope("pp_stage0_colpar");  // columns of the weight on both workers
    gt::matmul(x, weight).mean().backward();
  }
  optimizer.step();
  optimizer.zero_grad();
  // end of snippet
  EXPECT_FALSE(weight.grad().defined());
}

void train_on_a_text(const mini_gpt::MiniGpt& model, gt::Optimizer& optimizer) {
  // snippet: dataset
  const gt::Dataset text =
      gt::dataset({.path = "docs", .seq_len = 16, .batch = 8, .seed = 0, .vocab_size = 256});
  const auto [inputs, targets] = text.batch(0);  // (8, 16) tokens and those behind them, int64
  const gt::Tensor first = model.loss(inputs, targets);
  // end of snippet
  EXPECT_GT(first.item(), 0.0);
  // snippet: capture
  gt::Capture capture;
  gt::Value loss;
  for (int64_t step = 0; step < 100; ++step) {
    gt::Value before = std::move(loss);
    capture([&] {
      const auto [words, next] = text.batch(step);
      const gt::Tensor error = model.loss(words, next);
      error.backward();
      optimizer.step();
      optimizer.zero_grad();
      loss = error.fetch();
    });
    if (step > 0)
      std::printf("%f\n", before.floats()[0]);  // a step late: workers have the next one meanwhile
  }
  // end of snippet
  EXPECT_LT(static_cast<double>(loss.floats()[0]), first.item());
  EXPECT_GT(capture.replays(), 90) << capture.why();
}

void save_and_go_on(const mini_gpt::MiniGpt& model, gt::Optimizer& optimizer) {
  const int64_t step = 7;
  // snippet: save
  gt::save_training("run.safetensors", model.parameters(), optimizer, step);  // so many steps are done
  const int64_t done =
      gt::load_training("run.safetensors", model.parameters(), optimizer);  // the next program
  gt::save("weights.safetensors", model.parameters());                      // weights alone
  gt::load("run.safetensors", model.parameters());  // weights alone, also out of the file of a training
  // end of snippet
  EXPECT_EQ(done, step);
}

TEST(ControllerGuide, ItsProgramsRun) {
  ::setenv("XDG_CACHE_HOME", (text_folder() + "/cache").c_str(), 1);
  ::setenv("TRIREME_COMMAND", TRIREME_PROGRAM, 1);
  std::filesystem::create_directories(text_folder() + "/docs");
  std::filesystem::rename(some_text("page.txt", 4000), text_folder() + "/docs/page.txt");
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(text_folder());
  std::ofstream("signals.yaml") << "pp_stage0:\n  shard:\n    axis: 0\n    workers: [0, 1]\n";
  one_product();
  {
    const gt::Workers workers = gt::gpu_workers(2, {.signals = "signals.yaml"});
    const mini_gpt::MiniGpt model(
        {.layers = 1, .width = 32, .heads = 4, .hidden = 64, .vocabulary = 256, .tokens = 16, .stages = 1});
    std::vector<gt::Tensor> parameters;
    for (const auto& [name, tensor] : model.parameters()) parameters.push_back(tensor);
    gt::AdamW optimizer(parameters, 1e-2);
    train_on_a_text(model, optimizer);
    save_and_go_on(model, optimizer);
  }
  std::filesystem::current_path(before);
}

}  // namespace
}  // namespace trireme
