#pragma once
// Trains a tiny model with the engine on ranks as threads: what the laws about policies and layouts are
// tested on.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/sockets.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/nn/init.h"
#include "trireme/nn/language_model.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/model_facts.h"
#include "trireme/train/connect.h"

namespace trireme::test {

struct TinyRun {
  std::string policy = "fsdp";
  plan::ModelFamily family = plan::ModelFamily::kGpt2;
  int64_t ranks = 2;
  int64_t steps = 20;
  int64_t global_batch = 12;  ///< divides by 1, 2, 3, 4 and 6
  int64_t accumulation = 1;
  double grad_clip = 1.0;
  at::ScalarType compute = at::kFloat;
  std::optional<at::ScalarType> reduce = {};  ///< of gradients on the wire; none: as compute
  plan::SumDtype accumulate = plan::SumDtype::kFp32;
  plan::OptimState state = plan::OptimState::kFp32;
  int64_t replicas = 1;  ///< dp_replicate
  int64_t reshard = -1;  ///< after forward, over so many ranks; -1: as the row says
  bool overlap = true;
  int64_t bucket_bytes = 0;  ///< 0: units are blocks
  parallel::Reduction reduction = parallel::Reduction::kOrdered;
  parallel::ReduceWhen reduce_when = parallel::ReduceWhen::kOncePerStep;
  parallel::HookOptions hook = {};
  plan::Recompute recompute = plan::Recompute::kNone;
  double dropout = 0.0;
  bool messages = false;  ///< ranks send messages, as those of different hosts do; counts what sockets carry
  int64_t overflow_at =
      -1;  ///< before this step another one is made, whose gradients overflow and are dropped
};

struct TinyOutcome {
  std::string digest;
  std::map<std::string, at::Tensor> weights;
  std::vector<double> losses;
  std::map<plan::Collective, comm::Traffic> traffic;  ///< of rank 0 among all data-parallel ranks
  std::vector<plan::FlatLayout> layouts;
  int64_t reductions = 0;    ///< of rank 0, one a unit
  plan::StateBytes state;    ///< of rank 0 after the last step
  int64_t step_bytes = 0;    ///< sent by rank 0 in the last step
  int64_t socket_bytes = 0;  ///< carried for all ranks in the last step, with what gathers norm and loss
};

inline plan::ModelConfig tiny_model(plan::ModelFamily family) {
  plan::ModelConfig config;
  config.family = family;
  config.n_layers = 3;
  config.d_model = 24;  // sizes that leave padding in the flat buffers of 3 ranks
  config.n_heads = 4;
  config.n_kv_heads = family == plan::ModelFamily::kLlama ? 2 : 4;
  config.d_ff = 56;
  config.vocab_size = 37;
  return plan::complete(config, 8);
}

/// (global_batch, 9) tokens of a step: a noisy walk that a model can learn.
inline at::Tensor tiny_tokens(int64_t step, int64_t global_batch, int64_t vocab) {
  at::Tensor tokens = at::empty({global_batch, 9}, at::kLong);
  auto cells = tokens.accessor<int64_t, 2>();
  for (int64_t row = 0; row < global_batch; ++row) {
    uint64_t state = mix64(7, static_cast<uint64_t>(step * 1000 + row));
    for (int64_t column = 0; column < 9; ++column) {
      cells[row][column] = static_cast<int64_t>(state % static_cast<uint64_t>(vocab));
      state = (state * 3 + 1 + mix64(7, static_cast<uint64_t>(step * 1000 + row * 10 + column)) % 2) %
              static_cast<uint64_t>(vocab);
    }
  }
  return tokens;
}

inline std::vector<plan::UnitSpec> buckets_of(const plan::ModelFacts& facts, int64_t bytes) {
  std::vector<plan::ParamSpec> params;
  for (const plan::UnitSpec& unit : facts.units)
    params.insert(params.end(), unit.params.begin(), unit.params.end());
  return plan::make_buckets(params, 4, bytes);
}

inline TinyOutcome train_tiny(const TinyRun& run) {
  at::set_num_threads(1);
  TinyOutcome outcome;
  plan::ModelConfig config = tiny_model(run.family);
  config.dropout = run.dropout;
  const plan::ModelFacts facts = plan::describe(config, 8);
  const auto body = [&](std::shared_ptr<comm::World> world) {
    plan::ParallelConfig axes;
    axes.dp_replicate = run.replicas;
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
    const auto model = nn::build(config);
    parallel::Options options{.policy = plan::find_policy(run.policy),
                              .compute = run.compute,
                              .reduce = run.reduce.value_or(run.compute),
                              .accumulate = run.accumulate,
                              .device = at::kCPU,
                              .overlap = run.overlap,
                              .reduction = run.reduction,
                              .reduce_when = run.reduce_when,
                              .average = parallel::Average::kSum,
                              .hook = run.hook};
    if (run.reshard >= 0) options.policy.reshard_after_forward = run.reshard;
    parallel::DataParallel engine(
        *model, run.bucket_bytes > 0 ? buckets_of(facts, run.bucket_bytes) : facts.units, mesh, options,
        nn::InitialWeights(config, 11),
        run.bucket_bytes > 0 ? parallel::UseFrom::kBuckets : parallel::UseFrom::kRunUnit);
    train::connect(*model, engine, {.recompute = run.recompute});
    const auto optimizer =
        optim::build({.state = run.state, .lr = 1e-2, .eps = 1e-5}, engine.optimizer_params());
    int64_t step_bytes = 0, socket_bytes = 0;
    const int64_t micro = run.global_batch / run.ranks / run.accumulation;
    for (int64_t step = 0; step < run.steps; ++step) {
      const at::Tensor mine = tiny_tokens(step, run.global_batch, config.vocab_size)
                                  .chunk(run.ranks, 0)[static_cast<size_t>(mesh.dp_rank)];
      if (step == run.overflow_at) {
        const at::Tensor loss = model->loss(mine.narrow(1, 0, 8), mine.narrow(1, 1, 8));
        engine.backward(loss * std::numeric_limits<float>::infinity());
        TRIREME_CHECK(!std::isfinite(engine.grad_norm()), "gradients are finite");
        engine.skip_step();
      }
      double loss_sum = 0.0;
      std::optional<CarriedBytes> carried;
      if (run.messages) carried.emplace(*mesh.all);
      const int64_t sent_before = engine.sent_bytes();
      for (int64_t pass = 0; pass < run.accumulation; ++pass) {
        const at::Tensor batch = mine.narrow(0, pass * micro, micro);
        const at::Tensor loss = model->loss(batch.narrow(1, 0, 8), batch.narrow(1, 1, 8));
        const double scale = 1.0 / static_cast<double>(run.accumulation * run.ranks);
        pass + 1 == run.accumulation ? engine.backward(loss, scale) : engine.accumulate(loss, scale);
        loss_sum += loss.item<double>();
      }
      double all_losses = 0.0;
      std::vector<double> squares;
      for (const auto& rank : comm::gather_scalars(*mesh.dp, {engine.local_grad_squares(), loss_sum})) {
        squares.push_back(rank[0]);
        all_losses += rank[1];
      }
      const double norm = std::sqrt(engine.sum_over_ranks(squares));
      engine.step_scaled(*optimizer, optim::clip_factor(norm, run.grad_clip));
      // The norm and the loss, two doubles, go through the same group.
      step_bytes = engine.sent_bytes() - sent_before - (run.replicas == 1 ? 16 * (run.ranks - 1) : 0);
      if (carried) socket_bytes = carried->so_far();
      if (world->rank() == 0)
        outcome.losses.push_back(all_losses / static_cast<double>(run.accumulation * run.ranks));
    }
    plan::StateBytes state = engine.state_bytes();
    state.optimizer += optimizer->state_bytes();
    engine.average_parameters();
    const std::map<plan::Collective, comm::Traffic> traffic = mesh.dp->traffic();
    const std::string digest = parallel::weights_digest(engine);
    std::map<std::string, at::Tensor> weights;
    engine.visit_weights(
        [&](const std::string& name, const at::Tensor& weight) { weights[name] = weight.clone(); });
    if (world->rank() != 0) return;
    outcome.digest = digest;
    outcome.weights = weights;
    outcome.traffic = traffic;
    outcome.reductions = engine.reductions();
    outcome.state = state;
    outcome.step_bytes = step_bytes;
    outcome.socket_bytes = socket_bytes;
    for (const plan::UnitSpec& unit : facts.units) outcome.layouts.emplace_back(unit.params, run.ranks);
  };
  run_ranks(run.ranks, body, 20.0, 90.0, /*peer_memory=*/!run.messages);
  return outcome;
}

}  // namespace trireme::test
