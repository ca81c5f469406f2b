// A run that is ended and goes on from its checkpoint is the run that was never ended, bit for bit.
#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/support/refusal.h"
#include "tests/train/trainer_fixture.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/safetensors.h"
#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/saved_copy.h"
#include "trireme/report/run_dir.h"
#include "trireme/train/saved_record.h"

namespace trireme::train {
namespace {

/// Does something once a step is recorded, on rank 0.
class AfterStep : public Sink {
 public:
  explicit AfterStep(std::function<void(int64_t step)> body) : body_(std::move(body)) {}
  void record(const StepRecord& step) override { body_(step.step); }
  void finish(const RunSummary&) override {}

 private:
  std::function<void(int64_t)> body_;
};

class Resume : public TrainerTest {
 protected:
  void SetUp() override {
    TrainerTest::SetUp();
    config_.train.steps = 12;
    config_.train.micro_batch = 2;
    config_.train.val_every = 5;
    config_.train.sample_tokens = 0;
    config_.checkpoint.every = 4;
  }

  /// Trains; a signal comes when step `stop_at` is recorded, 0: never.
  TrainResult run(int64_t ranks, bool resume, int64_t stop_at = 0) {
    at::set_num_threads(1);
    recorder_ = {};
    stop_ = 0;
    AfterStep stopper([&](int64_t step) {
      if (step == stop_at) stop_ = SIGTERM;
      if (after_step_) after_step_(step);
    });
    TrainResult result;
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      TrainOptions mine = options();
      mine.sinks = {&recorder_, &stopper};
      mine.stop_signal = world->rank() == 0 ? &stop_ : nullptr;
      mine.checkpoint_dir = world->rank() == 0 ? checkpoints() : std::string();
      mine.resume = resume;
      mine.resume_from = world->rank() == 0 ? resume_from_ : std::string();
      try {
        const TrainResult outcome = train(mine, world);
        if (world->rank() == 0) result = outcome;
      } catch (const FailedElsewhere&) {
      }
    });
    return result;
  }

  std::string checkpoints() const { return (folder_ / "checkpoints").string(); }

  /// `config_` trained without a stop, and then with two; the same steps, losses and weights.
  void expect_exact(int64_t ranks, const std::string& what) {
    std::filesystem::remove_all(checkpoints());
    const TrainResult whole = run(ranks, false);
    const std::vector<StepRecord> steps = recorder_.steps;
    ASSERT_EQ(steps.size(), 12u) << what;
    EXPECT_EQ(whole.summary.checkpoints + whole.summary.checkpoints_late, 3) << what;
    std::filesystem::remove_all(checkpoints());

    std::vector<StepRecord> pieces;
    const auto go_on = [&](bool resume, int64_t stop_at) {
      const TrainResult result = run(ranks, resume, stop_at);
      pieces.insert(pieces.end(), recorder_.steps.begin(), recorder_.steps.end());
      return result;
    };
    const TrainResult first = go_on(false, 2);
    EXPECT_EQ(first.stop_signal, SIGTERM) << what;
    EXPECT_TRUE(first.resumable) << what;
    EXPECT_LT(first.summary.steps, 6) << what;
    EXPECT_EQ(go_on(true, 7).summary.resumed_at, first.summary.steps) << what;
    const TrainResult last = go_on(true, 0);
    EXPECT_EQ(last.summary.weights_digest, whole.summary.weights_digest) << what;
    EXPECT_EQ(last.summary.final_val_loss, whole.summary.final_val_loss) << what;
    // A stopped step does not validate.
    for (StepRecord& record : pieces) record.val_loss = steps[static_cast<size_t>(record.step) - 1].val_loss;
    expect_same_steps(pieces, steps);
    // A run that is complete has nothing to do.
    const TrainResult again = run(ranks, true);
    EXPECT_TRUE(recorder_.steps.empty()) << what;
    EXPECT_EQ(again.summary.weights_digest, whole.summary.weights_digest) << what;
    EXPECT_EQ(again.summary.final_loss, whole.summary.final_loss) << what;
  }

  std::function<void(int64_t)> after_step_;
  std::string resume_from_;
};

TEST_F(Resume, IsExactForEveryPolicy) {
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    config_.parallel.policy = policy;
    config_.checkpoint.async = policy != plan::PolicyName::kZero1;
    expect_exact(2, std::string(plan::name(policy)));
  }
}

TEST_F(Resume, IsExactForHybridShardingAndOnOneRank) {
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.parallel.sharding = plan::Sharding::kHybridShard;
  config_.parallel.dp_replicate = 2;
  expect_exact(4, "hybrid");
  config_.parallel = {};
  expect_exact(1, "one rank");
}

TEST_F(Resume, IsExactWithAverages) {
  config_.optim.ema = 0.8;
  expect_exact(2, "averages");
}

TEST_F(Resume, IsExactWithStateInFewerBits) {
  for (const plan::OptimState state : {plan::OptimState::kBf16, plan::OptimState::kInt8}) {
    config_.optim.state = state;
    for (const plan::PolicyName policy : {plan::PolicyName::kDdp, plan::PolicyName::kFsdp}) {
      config_.parallel.policy = policy;
      expect_exact(2, std::string(plan::name(state)));
    }
  }
}

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

TEST_F(Resume, KnowsTheBestWeightsOfBefore) {
  config_.checkpoint.best = true;
  config_.train.val_every = 1;
  config_.optim = {.lr = 2.0, .schedule = plan::LrSchedule::kConstant, .weight_decay = 0.0};
  const std::string path = options().best_weights_path;
  const TrainResult whole = run(2, false);
  const std::string best = read_file(path);
  ASSERT_GT(whole.summary.best_step, 0);
  ASSERT_LT(whole.summary.best_step, 8) << "so that a run that goes on from step 8 has nothing better";
  std::filesystem::remove_all(checkpoints());
  std::filesystem::remove(path);
  run(2, false, 8);
  EXPECT_EQ(run(2, true).summary.best_step, whole.summary.best_step);
  EXPECT_EQ(read_file(path), best);

  std::filesystem::remove_all(checkpoints());
  run(2, false, 8);
  write_file_atomic(path, "none of ours");
  ::testing::internal::CaptureStderr();
  EXPECT_GT(run(2, true).summary.best_step, 8);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("best weights so far are unknown"),
            std::string::npos);
}

TEST_F(Resume, AScoreThatIsNoNumberIsNoneOfBefore) {
  config_.checkpoint.best = true;
  config_.train.val_every = 1;
  run(2, false, 4);
  const std::string path = options().best_weights_path;
  checkpoint::SafetensorsWriter(path, {}, {{"note.step", "3"}, {"note.score", "nan"}}).commit();
  EXPECT_GT(run(2, true).summary.best_step, 4);
}

TEST_F(Resume, IsExactInBf16AndWithDropout) {
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.precision.compute = plan::Dtype::kBf16;
  expect_exact(2, "bf16");
  config_.precision.compute = plan::Dtype::kFp32;
  config_.model.dropout = 0.1;
  expect_exact(1, "dropout");  // threads share one generator, processes have their own
}

TEST_F(Resume, IsExactWithDelayedScalesOfFp8) {
  config_.precision.compute = plan::Dtype::kBf16;
  config_.precision.fp8 = {.recipe = plan::Fp8::kTensorwise,
                           .scales = plan::Fp8Scales::kDelayed,
                           .history = 3,
                           .fallback = plan::Fp8Fallback::kEmulate};
  expect_exact(2, "delayed");

  // Without the history, or with blocks that it knows nothing of, the first step has scales of its own.
  const auto goes_on = [&] {
    ::testing::internal::CaptureStderr();
    run(2, true, 8);
    return ::testing::internal::GetCapturedStderr();
  };
  constexpr const char* kLost = "has no history of the layers";
  for (const bool skips : {false, true}) {
    std::filesystem::remove_all(checkpoints());
    config_.precision.fp8.scales = skips ? plan::Fp8Scales::kDelayed : plan::Fp8Scales::kDynamic;
    if (skips) config_.precision.fp8.skip = *plan::parse_skip("last");
    run(2, false, 4);
    if (skips) {
      EXPECT_EQ(goes_on().find(kLost), std::string::npos);
    }
    config_.precision.fp8.scales = plan::Fp8Scales::kDelayed;
    config_.precision.fp8.skip = {};
    EXPECT_NE(goes_on().find(kLost), std::string::npos) << skips;
    EXPECT_FALSE(recorder_.steps.empty());
  }
}

TEST_F(Resume, IsExactWithHooksThatOwe) {
  config_.parallel.hook_start = 3;  // before the first stop is over
  config_.parallel.hook_density = 0.1;
  config_.parallel.hook_rank = 2;
  using plan::CommHook;
  for (const CommHook hook : {CommHook::kFp16, CommHook::kInt8, CommHook::kTopK, CommHook::kPowerSgd}) {
    config_.parallel.comm_hook = hook;
    config_.parallel.policy = hook == CommHook::kInt8 ? plan::PolicyName::kFsdp : plan::PolicyName::kDdp;
    expect_exact(2, std::string(plan::name(hook)));
  }
}

/// Ranks of local SGD are saved where they have averaged, with moments of their own; a run that is stopped in
/// between goes on from there.
TEST_F(Resume, IsExactWithLocalSgd) {
  config_.parallel.comm_hook = plan::CommHook::kLocalSgd;
  config_.parallel.policy = plan::PolicyName::kDdp;
  config_.parallel.local_steps = 2;
  config_.train.val_every = 0;
  config_.checkpoint.keep = 0;
  const std::string digest = run(2, false).summary.weights_digest;
  const std::vector<StepRecord> steps = recorder_.steps;
  for (const int64_t stop_at : {4, 5}) {
    std::filesystem::remove_all(checkpoints());
    const TrainResult first = run(2, false, stop_at);
    EXPECT_TRUE(first.resumable);
    const TrainResult last = run(2, true);
    const int64_t stopped_at = first.summary.steps;
    EXPECT_EQ(last.summary.resumed_at, stopped_at % 2 == 0 ? stopped_at : 4) << stop_at;
    EXPECT_EQ(last.summary.weights_digest, digest) << stop_at;
    const auto made_again = steps.begin() + static_cast<int64_t>(last.summary.resumed_at);
    expect_same_steps(recorder_.steps, {made_again, steps.end()});
  }
  const double loss = recorder_.steps.back().loss;
  std::filesystem::remove_all(checkpoints());
  run(2, false, 4);
  config_.parallel.comm_hook = plan::CommHook::kNone;
  EXPECT_NEAR(run(4, true).summary.final_loss, loss, 0.1 * loss) << "with the mean of moments";
  config_.parallel.comm_hook = plan::CommHook::kLocalSgd;
  config_.parallel.local_steps = 3;
  config_.checkpoint.every = 3;
  resume_from_ = checkpoints() + "/step-00000004";
  test::expect_refusal([&] { run(2, true); }, {"step 4", "parallel.local_steps=3"});
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

TEST_F(Resume, IsExactInStages) {
  config_.model.n_layers = 4;
  config_.parallel.pp = 2;
  config_.train.micro_batch = 1;
  const std::pair<plan::ScheduleName, plan::PolicyName> pairs[] = {
      {plan::ScheduleName::k1F1B, plan::PolicyName::kDdp},
      {plan::ScheduleName::kZbV, plan::PolicyName::kFsdp},
      {plan::ScheduleName::kDualPipe, plan::PolicyName::kZero2}};
  for (const auto& [schedule, policy] : pairs) {
    config_.model.tie_embeddings = schedule != plan::ScheduleName::kZbV;
    config_.pipeline.schedule = schedule;
    config_.parallel.policy = policy;
    expect_exact(4, std::string(plan::name(schedule)));
  }
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

/// The head is one tensor in the checkpoint, whoever has rows of it.
TEST_F(Resume, GoesOnWithAHeadThatIsSpreadOrNotAnyMore) {
  config_.model.n_layers = 4;
  config_.model.tie_embeddings = false;
  config_.optim.eps = 1e-4;
  const double loss = run(1, false).summary.final_loss;
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
  for (const auto& [from, to] : others) {
    const std::string what = fmt::format("pp={} {} to pp={} {}", from.pp, from.spread, to.pp, to.spread);
    std::filesystem::remove_all(checkpoints());
    const int64_t done = run(lay_out(from), false, 5).summary.steps;
    const TrainResult result = run(lay_out(to), true);
    EXPECT_EQ(result.summary.resumed_at, done) << what;
    EXPECT_NEAR(result.summary.final_loss, loss, 1e-5 * loss) << what;
  }
  config_.train.micro_batch = 1;
  config_.parallel.policy = plan::PolicyName::kFsdp;
  lay_out({2, true});
  expect_exact(4, "spread");
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

TEST_F(Resume, TakesTheOneBeforeWhereTheNewestIsDamaged) {
  config_.checkpoint.async = false;
  config_.parallel.policy = plan::PolicyName::kFsdp;
  const std::string digest = run(2, false).summary.weights_digest;
  const std::string newest = checkpoints() + "/step-00000012/shard-00001.safetensors";
  std::fstream file(newest, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('?');
  file.close();
  const TrainResult result = run(2, true);
  EXPECT_EQ(result.summary.resumed_at, 8);
  EXPECT_EQ(result.summary.weights_digest, digest);
  EXPECT_EQ(checkpoint::newest_checkpoint(checkpoint::Folder(checkpoints())).checkpoint->commit().step, 12);
}

TEST_F(Resume, FailsWhereNoneCanBeReadAndBeginsWhereThereIsNone) {
  EXPECT_EQ(run(2, true).summary.resumed_at, 0);
  EXPECT_EQ(recorder_.steps.size(), 12u);
  for (const auto& entry : std::filesystem::directory_iterator(checkpoints())) {
    if (entry.is_directory()) std::filesystem::resize_file(entry.path() / "index.json", 1);
  }
  EXPECT_THROW(run(2, true), DataError);
}

TEST_F(Resume, GoesOnFromTheOneThatIsNamed) {
  config_.checkpoint.keep = 0;
  const std::string digest = run(2, false).summary.weights_digest;
  resume_from_ = checkpoints() + "/step-00000004";
  const TrainResult result = run(2, true);
  EXPECT_EQ(result.summary.resumed_at, 4);
  EXPECT_EQ(result.summary.weights_digest, digest);
  resume_from_ = checkpoints() + "/step-00000005";
  EXPECT_THROW(run(2, true), Error);
}

TEST_F(Resume, RefusesAnotherModelAndNamesTheKeys) {
  run(2, false, 2);
  config_.model.d_ff = 64;
  config_.seed = 43;
  config_.optim.lr = 2e-2;  // may change
  try {
    run(2, true);
    FAIL() << "it was not refused";
  } catch (const ConfigError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("seed, model.d_ff;"), std::string::npos) << message;
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

TEST_F(Resume, RefusesAveragesThatWouldBeginOrEnd) {
  for (const double ema : {0.8, 0.0}) {
    std::filesystem::remove_all(checkpoints());
    config_.optim.ema = ema;
    run(2, false, 4);
    config_.optim.ema = 0.8 - ema;
    EXPECT_THROW(run(2, true), ConfigError) << "it is no damage, which would take an older checkpoint";
    test::expect_refusal([&] { run(2, true); }, {"optim.ema"});
  }
  std::filesystem::remove_all(checkpoints());
  config_.optim.ema = 0.8;
  run(2, false, 4);
  config_.optim.ema = 0.9;
  EXPECT_NO_THROW(run(2, true));
}

TEST_F(Resume, RefusesToEndBeforeItsCheckpoint) {
  run(2, false);
  config_.train.steps = 10;
  EXPECT_THROW(run(2, true), ConfigError);
  test::expect_refusal([&] { run(2, true); }, {"step 12", "step 10", "train.steps"});
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
  EXPECT_NE(log_of(1).find("from a checkpoint without random numbers: dropout goes on with other masks"),
            std::string::npos);
  EXPECT_EQ(log_of(1).find("other masks"), std::string::npos);
  const auto newest = [&] {
    return checkpoint::newest_checkpoint(checkpoint::Folder(checkpoints())).checkpoint->path();
  };
  replace_random(newest(), std::string(32, '0'));  // as many bytes as a GPU's has
  EXPECT_NE(log_of(1).find("on another device: dropout"), std::string::npos);
  EXPECT_NE(log_of(2).find("on other ranks: dropout"), std::string::npos);
}

TEST_F(Resume, ARunThatHasACheckpointIsResumableThoughItHasSavedNone) {
  run(2, false, 4);
  config_.checkpoint.every = 0;
  const TrainResult again = run(2, true, 7);
  EXPECT_EQ(again.stop_signal, SIGTERM);
  EXPECT_EQ(again.summary.checkpoints, 0);
  EXPECT_TRUE(again.resumable);
  EXPECT_FALSE(run(2, false, 2).resumable);
}

/// Two ranks that fail alike leave no part of the save under way out.
TEST_F(Resume, AnOrderlyFailureDoesNotGiveTheSaveUnderWayUp) {
  config_.optim.lr = 1e30;
  config_.train.grad_clip = 0.0;
  config_.train.val_every = 0;
  config_.checkpoint.every = 1;
  EXPECT_THROW(run(2, false), NumericsError);
  ASSERT_FALSE(recorder_.steps.empty());
  const checkpoint::Newest newest = checkpoint::newest_checkpoint(checkpoint::Folder(checkpoints()));
  ASSERT_NE(newest.checkpoint, nullptr);
  EXPECT_GE(newest.checkpoint->commit().step, 1);
}

TEST_F(Resume, RefusesOtherTextOfTheSameSize) {
  run(2, false, 2);
  const std::filesystem::path file = folder_ / "text" / "3.txt";
  const auto size = std::filesystem::file_size(file);
  std::fstream(file, std::ios::in | std::ios::out) << "THE";
  ASSERT_EQ(std::filesystem::file_size(file), size);
  test::expect_refusal([&] { run(2, true); }, {"digest", "the same data"});
  std::fstream(file, std::ios::in | std::ios::out) << "the";
  EXPECT_GT(run(2, true).summary.resumed_at, 0) << "what was written is what counts, not when";
}

TEST_F(Resume, KeepsAsManyAsItIsTold) {
  config_.checkpoint.every = 2;
  config_.checkpoint.keep = 3;
  const auto there = [&] {
    return std::ranges::count_if(std::filesystem::directory_iterator(checkpoints()),
                                 [](const auto& entry) { return entry.is_directory(); });
  };
  EXPECT_EQ(run(2, false).summary.checkpoints + recorder_.summary.checkpoints_late, 6);
  EXPECT_LE(there(), 3);
  EXPECT_GE(there(), 2);
  // What an attempt that died has left too much goes with the next, though that has nothing to save.
  config_.checkpoint.keep = 1;
  EXPECT_EQ(run(2, true).summary.checkpoints, 0);
  EXPECT_EQ(there(), 1);
}

/// The folder is gone: a warning each, and the same weights.
TEST_F(Resume, TrainingGoesOnWhereNothingCanBeWritten) {
  config_.checkpoint.async = false;
  const std::string digest = run(2, false).summary.weights_digest;
  std::filesystem::remove_all(checkpoints());
  after_step_ = [&](int64_t step) {
    if (step == 5) std::filesystem::remove_all(checkpoints());
  };
  const TrainResult result = run(2, false);
  EXPECT_EQ(result.summary.weights_digest, digest);
  EXPECT_EQ(result.summary.checkpoints, 1);
  EXPECT_EQ(result.summary.checkpoints_failed, 2);
}

TEST_F(Resume, SaysWhatASaveHasCost) {
  config_.checkpoint.async = false;
  run(2, false);
  for (const StepRecord& step : recorder_.steps)
    EXPECT_EQ(step.checkpoint_ms.has_value(), step.step % 4 == 0) << step.step;
}

/// A process that is killed behind the save of a step and before its record is published.
class KilledBefore : public Sink {
 public:
  struct Killed {};
  KilledBefore(int64_t step, std::function<bool()> is_saved) : step_(step), is_saved_(std::move(is_saved)) {}
  void record(const StepRecord& step) override {
    if (step.step != step_) return;
    const double began = monotonic_seconds();
    while (!is_saved_()) {
      if (monotonic_seconds() - began > 120.0) throw std::runtime_error("the step was never saved");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    throw Killed();
  }
  void finish(const RunSummary&) override {}

 private:
  int64_t step_;
  std::function<bool()> is_saved_;
};

/// metrics.jsonl without what is measured.
std::vector<nlohmann::json> lines_of(const report::RunDirectory& directory) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(read_file(directory.file("metrics.jsonl")));
  for (std::string line; std::getline(text, line);) {
    lines.push_back(nlohmann::json::parse(line));
    for (const char* key : {"tokens_per_s", "tflops_per_rank", "step_ms", "steps_per_s", "peak_bytes",
                            "communication_ms", "exposed_ms", "communication_share", "checkpoint_ms"})
      lines.back().erase(key);
  }
  return lines;
}

TEST(SavedRecord, ComesBackAsItWas) {
  StepRecord record;
  record.grad_norm = INFINITY;
  record.lr = 1e-3;
  record.tokens = 768;
  record.loss_scale = 65536.0;
  record.skipped = true;
  const auto saved = nlohmann::json::parse(record_to_json(record).dump());
  const StepRecord same = record_from_json(saved, 3, 0.1, "test");
  EXPECT_EQ(record_to_json(same), record_to_json(record));
  EXPECT_EQ(same.grad_norm, INFINITY);
  EXPECT_EQ(same.loss_scale, 65536.0);
  EXPECT_FALSE(same.communication_ms.has_value());
  for (const char* key : {"grad_norm", "skipped", "tokens", "exposed_ms"}) {
    nlohmann::json damaged = saved;
    damaged[key] = "x";
    EXPECT_THROW(record_from_json(damaged, 3, 0.1, "test"), DataError) << key;
    damaged.erase(key);
    EXPECT_THROW(record_from_json(damaged, 3, 0.1, "test"), DataError) << key;
  }
}

/// With validation behind the save and without, in the last step, and of a loss that is scaled. An
/// asynchronous save is the first or the last one, which are never late.
TEST_F(Resume, MetricsHaveEveryStepOnceWhereverTheRunWasKilled) {
  config_.train.val_every = 4;
  config_.train.steps = 11;
  config_.train.sample_tokens = 0;
  const auto train_alone = [&](const report::RunDirectory& directory, bool resume, int64_t killed_before) {
    at::set_num_threads(1);
    TrainResult result;
    test::run_ranks(1, [&](std::shared_ptr<comm::World> world) {
      KilledBefore killer(killed_before, [&] {
        return std::filesystem::exists(
            directory.file(fmt::format("checkpoints/step-{:08}/COMMIT.json", killed_before)));
      });
      const auto files = report::make_run_files_sink(directory);
      TrainOptions mine = options();
      mine.sinks = {&killer, files.get()};
      mine.checkpoint_dir = directory.file("checkpoints");
      mine.resume = resume;
      try {
        result = train(mine, world);
      } catch (const KilledBefore::Killed&) {
      }
    });
    return result;
  };
  struct Case {
    int64_t every, killed_before;
    bool async, scaled;
  };
  for (const Case& given : {Case{8, 8, true, false}, Case{4, 8, false, false}, Case{6, 6, true, false},
                            Case{4, 11, true, false}, Case{4, 4, true, true}}) {
    config_.checkpoint.every = given.every;
    config_.checkpoint.async = given.async;
    config_.precision.scaling = given.scaled ? plan::LossScaling::kDynamic : plan::LossScaling::kNone;
    const auto whole = report::RunDirectory::create((folder_ / "runs").string(), "whole", {});
    const auto killed = report::RunDirectory::create((folder_ / "runs").string(), "killed", {});
    const RunSummary wanted = train_alone(whole, false, 0).summary;
    train_alone(killed, false, given.killed_before);
    EXPECT_EQ(lines_of(killed).size(), static_cast<size_t>(given.killed_before - 1));
    const RunSummary got = train_alone(killed, true, 0).summary;
    EXPECT_EQ(got.resumed_at, given.killed_before);
    EXPECT_EQ(lines_of(killed), lines_of(whole)) << "killed before " << given.killed_before;
    EXPECT_EQ(got.final_val_loss, wanted.final_val_loss);
    EXPECT_EQ(got.weights_digest, wanted.weights_digest);
    const std::string text = read_file(killed.file("metrics.jsonl"));
    train_alone(killed, true, 0);  // twice
    EXPECT_EQ(read_file(killed.file("metrics.jsonl")), text);
  }
}

/// What each rank has copied, from the sizes of the pieces in its file.
std::vector<int64_t> copied_by_rank(const std::string& checkpoint) {
  const checkpoint::Checkpoint found(checkpoint);
  std::vector<int64_t> bytes(found.index().files.size(), 0);
  for (const auto& [name, tensor] : found.index().tensors) {
    const int64_t itemsize = checkpoint::safetensors_itemsize(tensor.dtype);
    for (const checkpoint::StoredPiece& piece : tensor.pieces)
      bytes[piece.file] += plan::saved_piece_bytes(piece.region.numel() * itemsize);
  }
  return bytes;
}

TEST_F(Resume, TheCopyOfASaveIsAsLargeAsPredicted) {
  config_.train.steps = 2;
  config_.train.global_batch = 24;
  config_.checkpoint.every = 2;
  config_.train.val_every = 0;
  config_.model.n_layers = 4;
  const auto expect_as_predicted = [&](int64_t ranks, int64_t more = 0) {
    std::filesystem::remove_all(checkpoints());
    const RunCost cost = run(ranks, false).summary.cost;
    const std::vector<int64_t> copied = copied_by_rank(checkpoints() + "/step-00000002");
    const int64_t most = *std::ranges::max_element(copied);
    const int64_t predicted = plan::rank_bytes(config_, ranks, plan::Device::kCpu).saved_copy;
    EXPECT_LE(predicted, most);
    EXPECT_GE(predicted, most - more);
    EXPECT_EQ(cost.measured_copy_bytes, copied.front());
    EXPECT_GT(cost.predicted_copy_bytes, 0);
  };
  for (const plan::PolicyName policy : plan::all_values<plan::PolicyName>()) {
    SCOPED_TRACE(plan::name(policy));
    config_.parallel.policy = policy;
    expect_as_predicted(3);
  }
  SCOPED_TRACE("of shards with replicas");
  config_.parallel.policy = plan::PolicyName::kFsdp;
  config_.parallel.sharding = plan::Sharding::kHybridShard;
  config_.parallel.dp_replicate = 2;
  expect_as_predicted(4);
  config_.parallel = {};
  SCOPED_TRACE("of one moment");
  config_.optim.name = plan::OptimizerName::kSgd;
  config_.optim.momentum = 0.9;
  expect_as_predicted(2);
  config_.optim.ema = 0.9;
  SCOPED_TRACE("of one moment and an average");
  expect_as_predicted(2);
  config_.optim.ema = 0.0;
  SCOPED_TRACE("of a hook that owes");
  config_.parallel.comm_hook = plan::CommHook::kTopK;
  config_.parallel.hook_start = 1;
  config_.parallel.hook_density = 0.1;
  const int64_t counts =
      64 * static_cast<int64_t>(12 * config_.model.n_layers + 5);  // of its steps, by rank 0
  expect_as_predicted(2, counts);
  SCOPED_TRACE("of ranks with moments of their own");
  config_.parallel.comm_hook = plan::CommHook::kLocalSgd;
  config_.parallel.policy = plan::PolicyName::kDdp;
  config_.parallel.local_steps = 2;
  expect_as_predicted(2);
  config_.parallel = {};
  for (const bool tied : {true, false}) {
    SCOPED_TRACE("of stages");
    config_.model.tie_embeddings = tied;
    config_.parallel.pp = 2;
    expect_as_predicted(4);
  }
  SCOPED_TRACE("of parts of a head");
  config_.pipeline.spread_head = true;
  expect_as_predicted(4);
}

TEST_F(Resume, ASaveThatTrainingWaitsForNeedsNoCopy) {
  config_.train.steps = 2;
  config_.checkpoint.every = 2;
  std::vector<std::string> saved;
  for (const bool async : {true, false}) {
    config_.checkpoint.async = async;
    std::filesystem::remove_all(checkpoints());
    const RunCost cost = run(2, false).summary.cost;
    EXPECT_EQ(cost.measured_copy_bytes > 0, async);
    EXPECT_EQ(cost.predicted_copy_bytes > 0, async);
    for (const char* shard : {"/shard-00000.safetensors", "/shard-00001.safetensors"})
      saved.push_back(read_file(checkpoints() + "/step-00000002" + shard));
  }
  EXPECT_TRUE(saved[0] == saved[2] && saved[1] == saved[3]) << "the same bytes";
}

TEST_F(Resume, NothingIsWrittenUnlessItIsAskedFor) {
  config_.checkpoint.every = 0;
  EXPECT_EQ(run(2, false).summary.checkpoints, 0);
  EXPECT_FALSE(std::filesystem::exists(checkpoints()));
}

}  // namespace
}  // namespace trireme::train
