#pragma once
// The small model's training by the workers of a thread, and by ranks that make one program.
#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tests/controller/small_mini_gpt.h"
#include "tests/support/spawn.h"
#include "trireme/controller/worker_ranks.h"
#include "trireme/gt/capture.h"
#include "trireme/gt/schedule.h"
#include "trireme/gt/workers.h"

namespace trireme {

struct Outcome {
  Values begin, end;
  std::vector<double> losses, norms;
  uint64_t hash = 0;
  int64_t replays = 0, arguments = 0;  ///< of captured steps
};

/// The way of training: a schedule of "" runs micro-batch after micro-batch.
struct Way {
  std::string schedule = {};
  gt::Dtype products = gt::Dtype::kFp32;
  int64_t steps = kSteps;
  bool captured = false;  ///< steps behind the first one
};

/// Steps of AdamW with clipped gradients by the workers of this thread.
inline Outcome trained_model(const mini_gpt::Config& config, const Way& way) {
  const std::string& schedule = way.schedule;
  gt::manual_seed(5);
  const mini_gpt::MiniGpt model(config);
  std::vector<gt::Tensor> parameters;
  for (const auto& [name, tensor] : model.parameters()) parameters.push_back(tensor);
  gt::AdamW optimizer(parameters, 1e-2);
  Outcome outcome;
  gt::Capture capture;
  std::vector<gt::Tensor> losses;
  gt::Tensor norm;
  const auto make = [&](int64_t step) {
    const auto loss_of = [&](int64_t micro_batch) {
      const gt::autocast products(way.products);
      return model.loss(words_of(step, micro_batch, 0), words_of(step, micro_batch, 1), kBatch);
    };
    losses.clear();
    if (schedule.empty()) {
      for (int64_t i = 0; i < kMicroBatches; ++i) {
        losses.push_back(loss_of(i));
        (losses.back() * (1.0 / kMicroBatches)).backward();
      }
    } else {
      losses = gt::schedule(schedule, kMicroBatches, loss_of);
    }
    if (step == 0) outcome.begin = values_of(model.parameters());
    norm = gt::clip_grad_norm(parameters, 0.5);
    optimizer.lr = 1e-2 / static_cast<double>(1 + step / 4);
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int64_t step = 0; step < way.steps; ++step) {
    if (way.captured && step > 0) {
      capture([&] { make(step); });
    } else {
      make(step);
    }
    double mean = 0;
    for (const gt::Tensor& loss : losses) mean += loss.item() / kMicroBatches;
    outcome.losses.push_back(mean);
    outcome.norms.push_back(norm.item());
  }
  outcome.end = values_of(model.parameters());
  outcome.replays = capture.replays();
  outcome.arguments = capture.arguments();
  return outcome;
}

/// The program that every rank makes for itself.
inline Outcome train_as_rank(const std::shared_ptr<comm::World>& world, const mini_gpt::Config& config,
                             int64_t tp, const Way& way) {
  const auto runner = std::make_shared<controller::RankProgram>(world);
  const gt::Workers workers(runner, {.signals = signals_file(config, tp, world->size())});
  Outcome outcome = trained_model(config, way);
  outcome.hash = runner->placer().hash();
  return outcome;
}

/// Training on tp x stages ranks, or half of them; all have the same values, and placed the same program.
inline Outcome run_mesh(const mini_gpt::Config& config, int64_t tp, const Way& way,
                        bool there_and_back = false) {
  std::mutex mutex;
  std::map<int64_t, Outcome> outcomes;
  test::run_ranks(tp * config.stages / (there_and_back ? 2 : 1), [&](std::shared_ptr<comm::World> world) {
    Outcome outcome = train_as_rank(world, config, tp, way);
    const std::lock_guard lock(mutex);
    outcomes[world->rank()] = std::move(outcome);
  });
  for (const auto& [rank, outcome] : outcomes) {
    EXPECT_EQ(outcome.end, outcomes[0].end);
    EXPECT_EQ(outcome.losses, outcomes[0].losses);
    EXPECT_EQ(outcome.hash, outcomes[0].hash);
  }
  return outcomes[0];
}

}  // namespace trireme
