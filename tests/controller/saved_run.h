#pragma once
// The small model's training, saved and going on from a file.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/controller/small_mini_gpt.h"
#include "tests/support/spawn.h"
#include "trireme/controller/worker_ranks.h"
#include "trireme/gt/save.h"
#include "trireme/gt/schedule.h"
#include "trireme/gt/workers.h"

namespace trireme {

struct SavedMesh {
  int64_t tp = 1, stages = 1;
};

inline std::string saved_path(const std::string& name) {
  return ::testing::TempDir() + "saved-" + std::to_string(::getpid()) + "-" + name + ".safetensors";
}

inline std::unique_ptr<gt::Optimizer> new_optimizer(bool adamw, const std::vector<gt::Tensor>& parameters) {
  // Gradients that are rounding alone stay small under this eps: meshes round otherwise.
  if (adamw) return std::make_unique<gt::AdamW>(parameters, 1e-2, 0.9, 0.999, 1e-3);
  return std::make_unique<gt::SGD>(parameters, 0.05, 0.9, 0.01);
}

/// The training of a model by the workers of this thread. Other seeds than 5 are those of a program that
/// loads.
class SavedRun {
 public:
  SavedRun(const mini_gpt::Config& config, bool adamw, int64_t seed)
      : model_((gt::manual_seed(seed), config)), named_(model_.parameters()) {
    for (const auto& [name, tensor] : named_) parameters_.push_back(tensor);
    optimizer_ = new_optimizer(adamw, parameters_);
  }

  void step(int64_t number) {
    const std::vector<gt::Tensor> all = gt::schedule("1f1b", kMicroBatches, [&](int64_t micro_batch) {
      return model_.loss(words_of(number, micro_batch, 0), words_of(number, micro_batch, 1), kBatch);
    });
    gt::clip_grad_norm(parameters_, 0.5);
    optimizer_->step();
    optimizer_->zero_grad();
    double mean = 0;
    for (const gt::Tensor& one : all) mean += one.item() / kMicroBatches;
    losses.push_back(mean);
  }

  void save(const std::string& path, int64_t step) const {
    gt::save_training(path, named_, *optimizer_, step);
  }
  int64_t load(const std::string& path) { return gt::load_training(path, named_, *optimizer_); }
  const gt::nn::NamedTensors& named() const { return named_; }

  std::vector<double> losses;

 private:
  mini_gpt::MiniGpt model_;
  gt::nn::NamedTensors named_;
  std::vector<gt::Tensor> parameters_;
  std::unique_ptr<gt::Optimizer> optimizer_;
};

/// Every rank makes the program of `body`, which knows whether it is the first.
inline void on_saved_mesh(const SavedMesh& mesh, const std::function<void(bool is_first)>& body) {
  test::run_ranks(mesh.tp * mesh.stages, [&](std::shared_ptr<comm::World> world) {
    const std::string signals = signals_file(with_stages(mesh.stages), mesh.tp, world->size());
    const gt::Workers workers(std::make_shared<controller::RankProgram>(world), {.signals = signals});
    body(world->rank() == 0);
  });
}

struct SavedOutcome {
  Values values;
  std::vector<double> losses;
  int64_t begin = 0;
};

/// Trains until step `end`, from a file where one is named, and writes another where one is.
inline SavedOutcome train_until(int64_t end, const SavedMesh& mesh, bool adamw, const std::string& from = "",
                                const std::string& to = "") {
  SavedOutcome outcome;
  on_saved_mesh(mesh, [&](bool is_first) {
    SavedRun run(with_stages(mesh.stages), adamw, from.empty() ? 5 : 6);
    const int64_t begin = from.empty() ? 0 : run.load(from);
    for (int64_t step = begin; step < end; ++step) run.step(step);
    if (!to.empty()) run.save(to, end);
    const Values values = values_of(run.named());
    if (is_first) outcome = {values, run.losses, begin};
  });
  return outcome;
}

}  // namespace trireme
