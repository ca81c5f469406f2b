// Captured steps by themselves (GT's compile_demo): a small network is trained by two workers, first with
// each step's instructions sent one by one, then captured, so that a step is a few numbers. Both learn the
// same.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/gt/capture.h"
#include "trireme/gt/nn.h"
#include "trireme/gt/workers.h"

namespace {

constexpr int64_t kSteps = 40, kLayers = 16, kWidth = 32;

struct Outcome {
  double loss = 0, median_ms = 0;
  gt::Capture capture = {};
};

Outcome train(bool captured) {
  gt::manual_seed(1);
  std::vector<gt::Tensor> weights;
  for (int64_t i = 0; i < kLayers; ++i) {
    weights.push_back(gt::randn({kWidth, kWidth}) * 0.2);
    weights.back().requires_grad_();
  }
  gt::AdamW optimizer(weights, 1e-3);
  const gt::Tensor x = gt::randn({8, kWidth}), y = gt::randn({8, kWidth});
  Outcome outcome;
  std::vector<double> milliseconds;
  for (int64_t step = 0; step < kSteps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    gt::Value loss;
    const auto make = [&] {
      gt::Tensor h = x;
      for (const gt::Tensor& weight : weights) h = gt::tanh(gt::matmul(h, weight));
      const gt::Tensor error = gt::square(h - y).mean();
      error.backward();
      optimizer.step();
      optimizer.zero_grad();
      loss = error.fetch();
    };
    captured ? outcome.capture(make) : make();
    outcome.loss = loss.floats()[0];
    milliseconds.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(milliseconds.begin() + kSteps / 2, milliseconds.end());
  outcome.median_ms = milliseconds[3 * kSteps / 4];
  return outcome;
}

}  // namespace

int main() {
  try {
    const gt::Workers workers = gt::gpu_workers(2);
    const Outcome plain = train(false), captured = train(true);
    std::printf("one by one  loss %.6f  %.2f ms a step\n", plain.loss, plain.median_ms);
    std::printf(
        "captured    loss %.6f  %.2f ms a step: %ld of %ld steps were %ld numbers for %ld instructions\n",
        captured.loss, captured.median_ms, static_cast<long>(captured.capture.replays()),
        static_cast<long>(captured.capture.calls()), static_cast<long>(captured.capture.arguments()),
        static_cast<long>(captured.capture.instructions()));
    return plain.loss == captured.loss ? 0 : 1;
  } catch (const trireme::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return static_cast<int>(error.exit_code());
  }
}
