// A run that goes on with other values of keys that are free, or on other ranks.
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/refusal.h"
#include "tests/train/resume_fixture.h"
#include "trireme/base/env.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/plan/config.h"

namespace trireme::train {
namespace {

TEST_F(Resume, GoesOnWithStateInOtherBits) {
  const double whole = run(2, false).summary.final_loss;
  for (const auto& [before, after] : {std::pair(plan::OptimState::kFp32, plan::OptimState::kInt8),
                                      std::pair(plan::OptimState::kInt8, plan::OptimState::kBf16)}) {
    std::filesystem::remove_all(checkpoints());
    config_.optim.state = before;
    run(2, false, 6);
    config_.optim.state = after;
    EXPECT_NEAR(run(2, true).summary.final_loss, whole, 0.02 * whole) << plan::name(after);
  }
}

/// What two ranks owe is paid by one or by three; what is owed when nobody pays any more is given up.
TEST_F(Resume, GoesOnWithHooksOnOtherRanks) {
  config_.parallel.comm_hook = plan::CommHook::kTopK;
  config_.parallel.hook_start = 1;
  config_.parallel.hook_density = 0.1;
  config_.train.micro_batch = 1;
  config_.train.global_batch = 6;
  const double loss = run(2, false).summary.final_loss;
  for (const int64_t ranks : {1, 3}) {
    std::filesystem::remove_all(checkpoints());
    run(2, false, 5);
    EXPECT_NEAR(run(ranks, true).summary.final_loss, loss, 0.1 * loss) << ranks;
  }
  std::filesystem::remove_all(checkpoints());
  run(2, false, 5);
  config_.parallel.comm_hook = plan::CommHook::kNone;
  EXPECT_LT(run(2, true).summary.final_loss, loss);
}

/// Which keys make a step's samples is of no consequence.
TEST_F(Resume, GoesOnWithAsManySamplesOfAStepMadeOtherwise) {
  config_.train.micro_batch = 1;
  const double loss = run(2, false).summary.final_loss;
  std::filesystem::remove_all(checkpoints());
  config_.train.global_batch = 16;  // counts only where there is no rank_batch
  config_.train.rank_batch = 4;
  run(2, false, 3);
  test::expect_refusal(
      [&] { run(1, true); },
      {"8 samples per step", "has 4 (train.rank_batch=4 x 1 data-parallel ranks)", "set train.rank_batch=8"});
  config_.train.rank_batch = 8;
  run(1, true, 7);
  config_.train.rank_batch = 0;
  test::expect_refusal([&] { run(2, true); }, {"has 16;", "set train.global_batch=8"});
  config_.train.global_batch = 8;
  EXPECT_NEAR(run(2, true).summary.final_loss, loss, 1e-3 * loss);
}

/// Stages of other numbers round gradients otherwise.
TEST_F(Resume, GoesOnInOtherStages) {
  config_.model.n_layers = 4;
  config_.optim.eps = 1e-4;  // updates of gradients near 0 do not depend on how they were rounded
  const double loss = run(1, false).summary.final_loss;
  const std::vector<StepRecord> steps = recorder_.steps;
  const std::pair<int64_t, int64_t> others[] = {{1, 2}, {2, 1}, {2, 4}, {4, 2}};
  for (const auto& [from, to] : others) {
    std::filesystem::remove_all(checkpoints());
    config_.parallel.pp = from;
    const int64_t done = run(from, false, 5).summary.steps;
    config_.parallel.pp = to;
    const TrainResult result = run(to, true);
    EXPECT_EQ(result.summary.resumed_at, done) << from << " to " << to;
    EXPECT_NEAR(result.summary.final_loss, loss, 1e-5 * loss) << from << " to " << to;
    for (const StepRecord& record : recorder_.steps) {
      const double wanted = steps[static_cast<size_t>(record.step) - 1].loss;
      EXPECT_NEAR(record.loss, wanted, 1e-5 * wanted) << from << " to " << to << ", step " << record.step;
    }
  }
}

/// The head is one tensor in the checkpoint, or the embeddings are, whoever has rows of it.
TEST_F(Resume, GoesOnWithAHeadThatIsSpreadOrNotAnyMore) {
  config_.model.n_layers = 4;
  config_.optim.eps = 1e-4;
  struct Layout {
    int64_t pp;
    bool spread;
  };
  const std::pair<Layout, Layout> others[] = {
      {{2, true}, {1, false}}, {{1, false}, {2, true}}, {{2, true}, {4, true}}, {{4, true}, {2, false}}};
  const auto lay_out = [&](const Layout& layout) {
    config_.parallel.pp = layout.pp;
    config_.pipeline.spread_head = layout.spread;
    return layout.pp;
  };
  for (const bool tied : {false, true}) {
    config_.model.tie_embeddings = tied;
    std::filesystem::remove_all(checkpoints());
    const double loss = run(lay_out({1, false}), false).summary.final_loss;
    for (const auto& [from, to] : others) {
      const std::string what =
          fmt::format("pp={} {} to pp={} {}, tied {}", from.pp, from.spread, to.pp, to.spread, tied);
      std::filesystem::remove_all(checkpoints());
      const int64_t done = run(lay_out(from), false, 5).summary.steps;
      const TrainResult result = run(lay_out(to), true);
      EXPECT_EQ(result.summary.resumed_at, done) << what;
      EXPECT_NEAR(result.summary.final_loss, loss, 1e-5 * loss) << what;
    }
  }
}

/// Copies of tied embeddings are not saved: they and their state go on with what the first stage has, to the
/// same bits.
TEST_F(Resume, IsExactWithAHeadThatIsSpread) {
  config_.model.n_layers = 4;
  config_.train.micro_batch = 1;
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.parallel.pp = 2;
  config_.pipeline.spread_head = true;
  config_.model.tie_embeddings = false;
  expect_exact(4, "untied");
  config_.model.tie_embeddings = true;
  config_.model.vocab_size += 3;
  expect_exact(4, "tied");
  config_.optim.ema = 0.8;
  for (const plan::OptimState state : {plan::OptimState::kBf16, plan::OptimState::kInt8}) {
    config_.optim.state = state;
    expect_exact(4, fmt::format("tied, {}", plan::name(state)));
  }
}

/// Policies agree bit for bit on the same ranks; other ranks add gradients in another order.
TEST_F(Resume, GoesOnUnderAnotherPolicyAndOnOtherRanks) {
  config_.parallel.policy = plan::PolicyName::kDdp;
  const std::string digest = run(2, false).summary.weights_digest;
  const std::vector<StepRecord> steps = recorder_.steps;
  using plan::PolicyName;
  const std::pair<PolicyName, int64_t> others[] = {
      {PolicyName::kFsdp, 2}, {PolicyName::kZero1, 2}, {PolicyName::kZero2, 4}, {PolicyName::kFsdp, 1}};
  for (const auto& [policy, ranks] : others) {
    std::filesystem::remove_all(checkpoints());
    config_.parallel.policy = plan::PolicyName::kZero2;
    const int64_t done = run(2, false, 5).summary.steps;
    config_.parallel.policy = policy;
    const TrainResult result = run(ranks, true);
    EXPECT_EQ(result.summary.resumed_at, done);
    if (ranks == 2) {
      EXPECT_EQ(result.summary.weights_digest, digest) << plan::name(policy);
    }
    ASSERT_EQ(recorder_.steps.size(), steps.size() - static_cast<size_t>(done));
    EXPECT_NEAR(recorder_.steps.back().loss, steps.back().loss, 1e-4)
        << plan::name(policy) << " on " << ranks;
  }
}

TEST_F(Resume, GoesOnWithOtherValuesOfWhateverKeyIsFree) {
  const plan::Config before = config_;
  const std::vector<std::vector<std::string>> all = {
      {"optim.lr=0.002", "optim.min_lr=0.0001", "optim.warmup_steps=3", "optim.schedule=linear"},
      {"optim.beta1=0.8", "optim.beta2=0.9", "optim.eps=1e-6", "optim.weight_decay=0.2", "optim.state=int8"},
      {"precision.compute=bf16", "precision.fp8=tensorwise", "precision.fp8_fallback=emulate"},
      {"precision.scaling=dynamic", "precision.scale_window=2", "precision.scale_hysteresis=1"}};
  for (const std::vector<std::string>& overrides : all) {
    std::filesystem::remove_all(checkpoints());
    config_ = before;
    run(2, false, 4);
    config_ =
        plan::load({.path = {}, .text = plan::to_yaml({before, {}}), .overrides = overrides}, Environment())
            .config;
    EXPECT_NO_THROW(run(2, true, 6)) << overrides.front();
    EXPECT_GE(recorder_.summary.resumed_at, 4) << overrides.front();
  }
}

TEST_F(Resume, ALossScaleBeginsWhereThereWasNoneAndWhereItIsGivenAnew) {
  run(2, false, 4);
  const auto first_scale = [&](double initial) {
    config_.precision.scaling = plan::LossScaling::kDynamic;
    config_.precision.loss_scale.initial = initial;
    run(2, true, recorder_.steps.back().step + 1);
    return recorder_.steps.front().loss_scale.value_or(0.0);
  };
  config_.precision.loss_scale.window = 1;  // so that it doubles at once
  EXPECT_EQ(first_scale(1024.0), 1024.0) << "switched on";
  EXPECT_GT(first_scale(1024.0), 1024.0) << "it goes on";
  EXPECT_EQ(first_scale(64.0), 64.0) << "given anew";
}

/// The bytes that this rank's generator has left, as if `state` had been saved in their place.
void replace_random(const std::string& path, const std::string& state) {
  checkpoint::Index index;
  checkpoint::Commit commit;
  nlohmann::json document;
  {
    const checkpoint::Checkpoint found(path);
    index = found.index();
    commit = found.commit();
    document = nlohmann::json::parse(found.state());
  }
  document["ranks"]["0"]["random"] = state;
  const std::string text = document.dump();
  index.state.bytes = index.state.header_bytes = std::ssize(text);
  index.state.header_digest = xxh3(text);
  const std::string index_text = checkpoint::format_index(index);
  commit.index_bytes = std::ssize(index_text);
  commit.index_digest = xxh3(index_text);
  write_file_atomic(path + "/state.json", text);
  write_file_atomic(path + "/index.json", index_text);
  write_file_atomic(path + "/COMMIT.json", checkpoint::format_commit(commit));
}

TEST_F(Resume, BeginsOtherMasksOfDropoutAndSaysWhy) {
  const auto log_of = [&](int64_t ranks) {
    ::testing::internal::CaptureStderr();
    run(ranks, true, recorder_.steps.back().step + 1);
    return ::testing::internal::GetCapturedStderr();
  };
  config_.checkpoint.keep = 0;
  run(1, false, 4);
  config_.model.dropout = 0.1;
  EXPECT_NE(
      log_of(1).find("from a checkpoint without random numbers: dropout continues with different masks"),
      std::string::npos);
  EXPECT_EQ(log_of(1).find("different masks"), std::string::npos);
  const auto newest = [&] {
    return checkpoint::newest_checkpoint(checkpoint::Folder(checkpoints())).checkpoint->path();
  };
  replace_random(newest(), std::string(32, '0'));  // as many bytes as a GPU's has
  EXPECT_NE(log_of(1).find("on another device: dropout"), std::string::npos);
  EXPECT_NE(log_of(2).find("on another number of ranks: dropout"), std::string::npos);
}

}  // namespace
}  // namespace trireme::train
