#include "trireme/controller/worker_replay.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include <algorithm>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/controller/worker_datasets.h"
#include "trireme/tensor/numbered_tensors.h"
#include "trireme/tensor/op_kernels.h"

namespace trireme::controller {
namespace {

/// Values that a file of a program does not have: numbers that depend on their input alone.
class ReplayedValues : public tensor::Outside {
 public:
  ReplayedValues(const ReplaySettings& settings, comm::World& world, const Environment& environment)
      : settings_(settings), datasets_(world, environment, settings.name) {}

  void add_dataset(const plan::DatasetSpec& spec) { datasets_.add(spec); }

  at::Tensor value(int64_t from, const plan::TensorType& type) override {
    const auto dtype = tensor::scalar_type_of(type.dtype);
    if (!settings_.random_values || !plan::is_floating(type.dtype)) return at::zeros(type.shape, dtype);
    const auto seed = static_cast<uint64_t>(settings_.seed) * 1'000'003 + static_cast<uint64_t>(from);
    return at::randn(type.shape, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat).to(dtype);
  }

  at::Tensor batch(const tensor::BatchRows& wanted) override { return datasets_.rows(wanted); }

  void answer(int64_t to, const at::Tensor& value) override {
    constexpr int64_t kMostShown = 4;
    const at::Tensor flat = value.detach().reshape({-1});
    ReplayedValue fetched{.number = to, .elements = flat.numel()};
    for (int64_t i = 0; i < std::min(flat.numel(), kMostShown); ++i)
      fetched.first.push_back(flat[i].item<double>());
    fetched_.push_back(std::move(fetched));
  }

  std::vector<ReplayedValue> take() { return std::move(fetched_); }

 private:
  const ReplaySettings& settings_;
  WorkerDatasets datasets_;
  std::vector<ReplayedValue> fetched_;
};

}  // namespace

ReplayOutcome replay_program(comm::World& world, const plan::Program& program, const ReplaySettings& settings,
                             const Environment& environment) {
  ReplayedValues values(settings, world, environment);
  tensor::NumberedTensors tensors(world, values, settings.is_explicit);
  for (size_t i = 0; i < program.signals.size(); ++i)
    tensors.add_signal(program.signals[i], program.workers[i]);
  for (const plan::DatasetSpec& dataset : program.datasets) {
    tensors.add_dataset(dataset);
    values.add_dataset(dataset);
  }
  ReplayOutcome outcome;
  const double begin = monotonic_seconds();
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    const plan::Instruction& one = program.instructions[i];
    const double began = settings.timed ? monotonic_seconds() : 0.0;
    try {
      const bool is_ours = tensors.run(one);
      if (settings.timed && is_ours) {
        if (world.device().is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(world.device().index());
        outcome.times.push_back({static_cast<int64_t>(i), began, monotonic_seconds()});
      }
    } catch (const c10::Error& error) {
      throw Error(ExitCode::kFailed,
                  fmt::format("[controller.replay] {}: instruction {} '{}': {}", settings.name, i + 1,
                              to_text(one, program.signals), error.what_without_backtrace()));
    }
  }
  outcome.seconds = monotonic_seconds() - begin;
  outcome.hash = tensors.placer().hash();
  outcome.fetched = values.take();
  return outcome;
}

}  // namespace trireme::controller
