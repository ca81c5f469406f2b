#include "trireme/kernels/repeatable.h"

#include <ATen/ATen.h>

#include <mutex>
#include <optional>

#include "trireme/kernels/matmul.h"

namespace trireme::kernels {
namespace {

/// The settings of torch that decide about determinism.
struct Settings {
  bool algorithms = true;
  bool warn_only = false;
  bool fill_memory = false;  ///< memory that nobody has written would be filled, which costs time
  bool cudnn = true;
  bool cudnn_benchmark = false;  ///< would choose convolutions by their speed today

  static Settings now() {
    const at::Context& context = at::globalContext();
    return {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(),
            context.deterministicFillUninitializedMemory(), context.deterministicCuDNN(),
            context.benchmarkCuDNN()};
  }
  void apply() const {
    at::Context& context = at::globalContext();
    context.setDeterministicAlgorithms(algorithms, warn_only);
    context.setDeterministicFillUninitializedMemory(fill_memory);
    context.setDeterministicCuDNN(cudnn);
    context.setBenchmarkCuDNN(cudnn_benchmark);
  }
};

std::mutex mutex;
int holders = 0;
Settings before;
std::optional<MatmulTuning> no_tuning;

}  // namespace

Repeatable::Repeatable(bool on) : on_(on) {
  if (!on_) return;
  const std::lock_guard lock(mutex);
  if (holders++ > 0) return;
  before = Settings::now();
  Settings().apply();
  no_tuning.emplace(false);
}

Repeatable::~Repeatable() {
  if (!on_) return;
  const std::lock_guard lock(mutex);
  if (--holders > 0) return;
  no_tuning.reset();
  before.apply();
}

TunedConvolutions::TunedConvolutions(bool on) : on_(on), before_(at::globalContext().benchmarkCuDNN()) {
  if (on_) at::globalContext().setBenchmarkCuDNN(true);
}

TunedConvolutions::~TunedConvolutions() {
  if (on_) at::globalContext().setBenchmarkCuDNN(before_);
}

void choose_vector_functions() {
  static std::once_flag chosen;
  std::call_once(chosen, [] { at::zeros({1}, at::kFloat).exp(); });
}

bool must_repeat() {
  return at::globalContext().deterministicAlgorithms() &&
         !at::globalContext().deterministicAlgorithmsWarnOnly();
}

}  // namespace trireme::kernels
