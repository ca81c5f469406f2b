#pragma once
// Samples as good runs would leave them; tests plant what is wrong with one.
#include <fmt/format.h>

#include <string>
#include <vector>

#include "trireme/bench/results.h"

namespace trireme::bench {

/// The run of `slot`: eight steps of about `ms` milliseconds, no two runs alike.
inline Sample planted_sample(const Slot& slot, double ms) {
  Sample sample;
  sample.slot = slot;
  sample.directory = fmt::format("runs/{}-{}-{}", slot.block, slot.half, slot.arm);
  sample.workload = {{"model.d_model", "64"}, {"seed", "42"}, {kTokensKey, "512"}};
  for (int step = 0; step < 8; ++step) {
    sample.losses.push_back(5.0 - 0.1 * step);
    sample.grad_norms.push_back(2.0 + 0.1 * step);
    sample.step_ms.push_back(
        ms * (1.0 + 1e-4 * static_cast<double>(step + 10 * slot.block + 3 * slot.half + 5 * slot.arm)));
  }
  sample.weights_digest = "00112233445566aa";
  sample.wall_s = 8e-3 * 1.1 * ms;
  sample.peak_bytes = 1000;
  sample.state_bytes = 100;
  sample.sent_bytes = 10;
  sample.predicted_sent_bytes = 10;
  sample.compute = "fp32";
  return sample;
}

/// Two arms in three blocks: the second one takes `ratio` times less time.
inline TargetResult planted_target(double ratio = 1.2) {
  TargetResult target;
  target.name = "train:planted";
  target.mode = "declared";
  target.ranks = 2;
  target.steps = 8;
  target.warm_up = 2;
  target.blocks = 3;
  target.arms = {{.name = "a"}, {.name = "b"}};
  target.keys = {{"x=1"}, {"x=2"}};
  for (const Slot& slot : run_order(2, target.blocks))
    target.samples.push_back(planted_sample(slot, slot.arm == 0 ? 12.0 : 12.0 / ratio));
  Sample twin = planted_sample({}, 20.0);
  twin.losses.resize(6);
  target.twins = {twin};
  return target;
}

}  // namespace trireme::bench
