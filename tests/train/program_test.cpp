// Data, metrics and callbacks of a program of one's own in a run: order, resume, early end, best weights.
#include "trireme/train/program.h"
#include "tests/support/refusal.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <mutex>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "tests/train/resume_fixture.h"
#include "trireme/base/error.h"
#include "trireme/comm/agree.h"
#include "trireme/data/mixture.h"
#include "trireme/state/state_file.h"
#include "trireme/train/early_stop.h"

namespace trireme::train {
namespace {

/// Sample i counts up from i; what was read is remembered.
class CountedUp : public data::TokenSamples {
 public:
  CountedUp(int64_t size, int64_t seq_len) : size_(size), seq_len_(seq_len) {}
  int64_t size() const override { return size_; }
  int64_t seq_len() const override { return seq_len_; }
  uint64_t digest() const override { return static_cast<uint64_t>(size_); }
  void read(int64_t index, std::span<int64_t> tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = (index + static_cast<int64_t>(i)) % 16;
  }

 private:
  int64_t size_, seq_len_;
};

/// Samples of which no target counts.
class Silent : public CountedUp {
 public:
  using CountedUp::CountedUp;
  void read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const override {
    read(index, tokens);
    std::ranges::fill(targets, data::kIgnoredTarget);
  }
  bool ignores_targets() const override { return true; }
  int64_t kept_targets(int64_t) const override { return 0; }
};

/// Remembers all that it hears, and ends the run at a step.
class Listening : public Callback {
 public:
  explicit Listening(int64_t end_at) : end_at_(end_at) {}
  void on_step(const StepRecord& step) override { heard_ += fmt::format("s{} ", step.step); }
  std::optional<std::string> on_validation(const StepRecord& step) override {
    heard_ += fmt::format("v{}={} ", step.step, *step.val_loss);
    if (step.step < end_at_) return std::nullopt;
    return "it has heard enough";
  }
  std::string state() const override { return heard_; }
  void restore(const std::string& state) override { heard_ = state; }

 private:
  int64_t end_at_;
  std::string heard_;
};

Metric share_of_right_tokens() {
  return {.name = "right", .add = [](const at::Tensor& logits, const at::Tensor& targets) {
            const double right = logits.argmax(-1).eq(targets).sum().item<double>();
            return std::vector<double>{right, static_cast<double>(targets.numel())};
          }};
}

/// A loss of its own, which must be that of the run; and its opposite, of which more is better.
Metric cross_entropy_again(const std::string& name, double sign) {
  return {.name = name,
          .higher_is_better = sign < 0,
          .add = [sign](const at::Tensor& logits, const at::Tensor& targets) {
            const at::Tensor loss = at::cross_entropy_loss(logits.flatten(0, 1).to(at::kDouble),
                                                           targets.flatten(), {}, at::Reduction::Sum);
            return std::vector<double>{sign * loss.item<double>(), static_cast<double>(targets.numel())};
          }};
}

/// Throws in one of its functions.
class Failing : public Callback {
 public:
  explicit Failing(std::string where) : where_(std::move(where)) {}
  void on_step(const StepRecord&) override { at("step"); }
  std::optional<std::string> on_validation(const StepRecord&) override {
    at("validation");
    return std::nullopt;
  }
  std::string state() const override {
    at("state");
    return {};
  }

 private:
  void at(const std::string& here) const {
    if (here == where_) throw std::out_of_range("there is none");
  }

  std::string where_;
};

class ProgramRun : public Resume {
 protected:
  void SetUp() override {
    Resume::SetUp();
    config_.data.path = plan::kProgramData;
    config_.model.vocab_size = 16;
    config_.train.val_every = 2;
  }

  /// Each rank has a program of its own, as processes do.
  TrainResult run_program(int64_t ranks, bool resume, int64_t stop_at = 0) {
    at::set_num_threads(1);
    recorder_ = {};
    stop_ = 0;
    AfterStep stopper([&](int64_t step) {
      if (step == stop_at) stop_ = SIGTERM;
    });
    TrainResult result;
    states_ = {};
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      Program program = make_program();
      TrainOptions mine = options();
      mine.program = &program;
      mine.sinks = {&recorder_, &stopper};
      mine.stop_signal = world->rank() == 0 ? &stop_ : nullptr;
      mine.checkpoint_dir = world->rank() == 0 ? checkpoints() : std::string();
      mine.resume = resume;
      const TrainResult outcome = train(mine, world);
      const std::lock_guard lock(mutex_);
      for (const auto& callback : program.callbacks) states_.insert(callback->state());
      if (world->rank() == 0) result = outcome;
    });
    return result;
  }

  std::shared_ptr<const data::TokenSamples> training_samples(int64_t seq_len) const {
    auto counted = std::make_shared<CountedUp>(samples_, seq_len);
    if (weight_ == 0.0) return counted;
    return std::make_shared<data::Mixture>(std::vector<data::MixedSource>{
        {"up", 1.0, counted}, {"short", weight_, std::make_shared<CountedUp>(7, seq_len)}});
  }

  std::shared_ptr<const data::TokenSamples> held_out_samples(int64_t seq_len) const {
    auto counted = std::make_shared<CountedUp>(24, seq_len);
    if (!silent_) return counted;
    return std::make_shared<data::Mixture>(std::vector<data::MixedSource>{
        {"up", 1.0, counted}, {"silent", 1.0, std::make_shared<Silent>(8, seq_len)}});
  }

  Program make_program() const {
    Program program;
    program.open_data = [this](const plan::Config& config) {
      if (fails_ == "open") throw std::out_of_range("there is none");
      return make_run_data(config, {.train = training_samples(config.data.seq_len),
                                    .held_out = held_out_samples(config.data.seq_len),
                                    .vocab_size = 16});
    };
    program.metrics = {share_of_right_tokens(), cross_entropy_again("again", 1.0),
                       cross_entropy_again("minus", -1.0)};
    if (end_at_ > 0) program.callbacks = {std::make_shared<Listening>(end_at_)};
    if (!fails_.empty()) program.callbacks = {std::make_shared<Failing>(fails_)};
    const auto fails = [](auto&&...) -> std::vector<double> { throw std::out_of_range("there is none"); };
    if (fails_ == "add") program.metrics[0].add = fails;
    if (fails_ == "value")
      program.metrics[0].value = [](const auto&) -> double { throw std::out_of_range("no"); };
    if (without_metrics_) program.metrics.clear();
    if (fewer_is_better_) program.metrics[0].higher_is_better = false;
    return program;
  }

  int64_t samples_ = 100, end_at_ = 0;
  bool silent_ = false;  ///< half of what is held out does not count
  bool without_metrics_ = false;
  bool fewer_is_better_ = false;  ///< of the metric 'right'
  std::string fails_;             ///< the function that throws
  double weight_ = 0.0;           ///< of a second source; 0: there is one
  std::set<std::string> states_;  ///< of all callbacks of all ranks
  std::mutex mutex_;
};

TEST_F(ProgramRun, OneRankAndTwoReadTheSameSamplesAndMeasureTheSame) {
  run_program(1, false);
  const std::vector<StepRecord> alone = recorder_.steps;
  ASSERT_EQ(alone.size(), 12u);
  std::filesystem::remove_all(checkpoints());
  run_program(2, false);
  for (size_t i = 0; i < alone.size(); ++i) {
    const StepRecord &one = alone[i], &two = recorder_.steps[i];
    EXPECT_NEAR(two.loss, one.loss, 1e-5 * one.loss) << one.step;
    ASSERT_EQ(one.val_loss.has_value(), one.step % 2 == 0);
    ASSERT_EQ(two.val_metrics.size(), one.val_metrics.size());
    if (!one.val_loss) continue;
    EXPECT_NEAR(two.val_metrics.at("right"), one.val_metrics.at("right"), 0.01);
    for (const StepRecord* step : {&one, &two}) {
      EXPECT_NEAR(step->val_metrics.at("again"), *step->val_loss, 1e-5);
      EXPECT_EQ(step->val_metrics.at("minus"), -step->val_metrics.at("again"));
    }
  }
  EXPECT_GT(alone.back().val_metrics.at("right"), 0.3);
  EXPECT_EQ(recorder_.summary.final_val_metrics, recorder_.steps.back().val_metrics);
}

/// Two halts, at every place where the state of a callback could be lost or heard twice.
TEST_F(ProgramRun, GoesOnExactlyWithWhatItsCallbacksKnow) {
  end_at_ = 10;
  const TrainResult whole = run_program(2, false);
  ASSERT_EQ(whole.summary.steps, 10);
  ASSERT_TRUE(whole.summary.early_end);
  EXPECT_EQ(whole.summary.early_end->reason, "it has heard enough");
  ASSERT_EQ(states_.size(), 1u) << "ranks heard different things";
  const std::set<std::string> heard = states_;
  const TrainResult again = run_program(2, true);  // one that has ended
  EXPECT_EQ(states_, heard);
  EXPECT_TRUE(recorder_.steps.empty());
  ASSERT_TRUE(again.summary.early_end);
  EXPECT_EQ(again.summary.early_end->reason, "it has heard enough");
  for (int64_t stop_at = 1; stop_at < 9; ++stop_at) {
    std::filesystem::remove_all(checkpoints());
    ASSERT_EQ(run_program(2, false, stop_at).stop_signal, SIGTERM) << stop_at;
    const TrainResult resumed = run_program(2, true);
    EXPECT_EQ(resumed.summary.weights_digest, whole.summary.weights_digest) << stop_at;
    EXPECT_EQ(resumed.summary.steps, 10) << stop_at;
    EXPECT_EQ(states_, heard) << stop_at;
  }
  std::filesystem::remove_all(checkpoints());
  run_program(2, false, 3);
  end_at_ = 0;
  const std::string said = test::failure_of<ConfigError>([&] { run_program(1, true); });
  EXPECT_NE(said.find("1 callbacks"), std::string::npos) << said;
}

TEST_F(ProgramRun, AMonitorOfWhichMoreIsBetterStopsAsTheLossDoes) {
  config_.train.steps = 24;
  config_.train.early_stop = 2;
  config_.train.early_stop_min_delta = 0.5;
  config_.checkpoint.best = true;
  const auto run_by = [&](const std::string& monitor) {
    std::filesystem::remove_all(checkpoints());
    std::filesystem::remove_all(folder_ / "best");
    config_.train.monitor = monitor;
    return run_program(2, false).summary;
  };
  const RunSummary loss = run_by("loss"), minus = run_by("minus");
  ASSERT_TRUE(loss.early_end) << "the loss fell too fast for the test";
  ASSERT_TRUE(minus.early_end);
  EXPECT_EQ(minus.early_end->step, loss.early_end->step);
  EXPECT_EQ(minus.early_end->best_step, loss.early_end->best_step);
  EXPECT_EQ(minus.best_step, loss.best_step);
  EXPECT_EQ(minus.early_end->metric, "minus");
  EXPECT_TRUE(minus.early_end->higher_is_better);
  EXPECT_NEAR(*minus.early_end->best_value, -*loss.early_end->best_value, 1e-5);
  EXPECT_EQ(state::read_notes(options().best_weights_path).at("monitor"), "minus");
}

/// As a run that was not stopped, on the same number of ranks and on another one, to the last bit and to
/// rounding.
TEST_F(ProgramRun, AMixtureGoesOnExactlyAndOnOtherRanks) {
  weight_ = 0.25;
  const TrainResult whole = run_program(2, false);
  const std::vector<StepRecord> steps = recorder_.steps;
  std::filesystem::remove_all(checkpoints());
  run_program(2, false, 5);
  EXPECT_EQ(run_program(2, true).summary.weights_digest, whole.summary.weights_digest);
  std::filesystem::remove_all(checkpoints());
  run_program(1, false, 5);
  run_program(4, true);
  for (const StepRecord& step : recorder_.steps) {
    const double same = steps[static_cast<size_t>(step.step) - 1].loss;
    EXPECT_NEAR(step.loss, same, 1e-5 * same) << step.step;
  }
  weight_ = 0.5;
  const std::string said = test::failure_of<ConfigError>([&] { run_program(1, true); });
  EXPECT_NE(said.find("digest"), std::string::npos) << said;
}

TEST_F(ProgramRun, RefusesOtherSamplesOnResume) {
  run_program(1, false, 3);
  samples_ = 101;
  const std::string said = test::failure_of<ConfigError>([&] { run_program(1, true); });
  EXPECT_NE(said.find("100 samples"), std::string::npos) << said;
}

TEST_F(ProgramRun, RefusesAMonitorThatIsNotMeasured) {
  config_.train.monitor = "accurcy";
  const std::string said = test::failure_of<ConfigError>([&] { run_program(1, false); });
  EXPECT_NE(said.find("loss, right, again, minus"), std::string::npos) << said;
}

TEST_F(ProgramRun, RefusesMetricsThatCannotBeMeasured) {
  const auto said = [&](const Metric& metric) {
    return test::failure_of<ConfigError>([&] { check_program({.metrics = {metric}}, config_); });
  };
  Metric good = share_of_right_tokens();
  EXPECT_EQ(said(good), "");
  Metric other = good;
  for (const char* name : {"", "loss", "top1", "Right", "a/b"}) {
    other.name = name;
    EXPECT_NE(said(other), "") << name;
  }
  other = good;
  other.sums = 3;
  EXPECT_NE(said(other).find("value()"), std::string::npos);
  other.value = [](const std::vector<double>& sums) { return sums[2]; };
  EXPECT_EQ(said(other), "");
  other.add = {};
  EXPECT_NE(said(other).find("no add()"), std::string::npos);
  EXPECT_NE(test::failure_of<ConfigError>([&] { check_program({.metrics = {good, good}}, config_); }), "");
  EXPECT_NE(test::failure_of<ConfigError>([&] { check_program({.callbacks = {nullptr}}, config_); }), "");
  config_.parallel.pp = 2;
  EXPECT_NE(said(good).find("parallel.pp=2"), std::string::npos);
}

TEST_F(ProgramRun, RefusesDataThatDoesNotFit) {
  const auto samples = [](int64_t size, int64_t length) { return std::make_shared<CountedUp>(size, length); };
  const int64_t length = config_.data.seq_len;
  const auto said = [&](OwnTokens tokens) {
    return test::failure_of<ConfigError>([&] { make_run_data(config_, std::move(tokens)); });
  };
  EXPECT_EQ(said({.train = samples(1, length), .vocab_size = 16}), "");
  EXPECT_NE(said({.train = nullptr, .vocab_size = 16}), "");
  EXPECT_NE(said({.train = samples(0, length), .vocab_size = 16}).find("0 training samples"),
            std::string::npos);
  EXPECT_NE(said({.train = samples(1, length - 1), .vocab_size = 16}).find("data.seq_len=32"),
            std::string::npos);
  EXPECT_NE(said({.train = samples(1, length), .held_out = samples(0, length), .vocab_size = 16}), "");
  EXPECT_NE(said({.train = samples(1, length)}).find("vocab_size=0"), std::string::npos);
  const auto data = make_run_data(config_, {.train = samples(1, length), .vocab_size = 17});
  EXPECT_NE(test::failure_of<ConfigError>([&] { data->check_fits(config_.model); }).find("at least 17"),
            std::string::npos);
}

/// Wrong in one way of those that are possible.
class Wrong : public CountedUp {
 public:
  enum class Way { kToken, kTarget, kShortOrder, kOrder };
  Wrong(Way way, int64_t seq_len) : CountedUp(24, seq_len), way_(way) {}
  void read(int64_t index, std::span<int64_t> tokens) const override {
    CountedUp::read(index, tokens);
    if (way_ == Way::kToken) tokens.back() = 16;
  }
  void read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const override {
    CountedUp::read_targets(index, tokens, targets);
    if (way_ == Way::kTarget) targets.front() = data::kIgnoredTarget;
  }
  std::vector<int64_t> order(int64_t begin, int64_t count, uint64_t seed) const override {
    std::vector<int64_t> all = CountedUp::order(begin, count, seed);
    if (way_ == Way::kShortOrder) all.pop_back();
    if (way_ == Way::kOrder) all.back() = 24;
    return all;
  }

 private:
  Way way_;
};

TEST_F(ProgramRun, NamesSamplesThatAreNotAsTheyMustBe) {
  const int64_t length = config_.data.seq_len;
  const auto said = [&](Wrong::Way way, bool held_out) -> std::string {
    const auto good = std::make_shared<CountedUp>(24, length);
    const auto wrong = std::make_shared<Wrong>(way, length);
    const auto data = held_out ? make_run_data(config_, {.train = good, .held_out = wrong, .vocab_size = 16})
                               : make_run_data(config_, {.train = wrong, .vocab_size = 16});
    const FeedOptions options{.global_batch = 4, .micro_batch = 4};
    try {
      held_out ? data->validation(4, options).next() : data->feed(options)();
    } catch (const DataError& error) {
      return error.what();
    }
    return {};
  };
  for (const bool held_out : {false, true}) {
    EXPECT_NE(said(Wrong::Way::kToken, held_out).find("is 16, but OwnTokens::vocab_size=16"),
              std::string::npos);
    EXPECT_NE(said(Wrong::Way::kTarget, held_out).find("target 0 of sample"), std::string::npos);
  }
  EXPECT_NE(said(Wrong::Way::kShortOrder, false).find("has 3 entries"), std::string::npos);
  EXPECT_NE(said(Wrong::Way::kOrder, false).find("from 0 to 23"), std::string::npos);
}

TEST_F(ProgramRun, SourcesOfAHeldOutMixtureAreValidatedForThemselves) {
  const int64_t length = config_.data.seq_len;
  const auto source = [&](int64_t size) { return std::make_shared<CountedUp>(size, length); };
  const auto mixture = std::make_shared<data::Mixture>(
      std::vector<data::MixedSource>{{"up", 3.0, source(24)}, {"short", 1.0, source(7)}});
  const auto data = make_run_data(config_, {.train = source(24), .held_out = mixture, .vocab_size = 16});
  ASSERT_EQ(data->held_out_sets().size(), 2u);
  EXPECT_EQ(data->held_out_sets()[1].name, "short");
  EXPECT_EQ(data->val_samples(), 31);
  const FeedOptions options{.global_batch = 4, .micro_batch = 4};
  EXPECT_EQ(data->validation_of(1, 100, options).batches, 2);
  const auto nested = std::make_shared<data::Mixture>(
      std::vector<data::MixedSource>{{"all", 1.0, mixture}, {"more", 1.0, source(9)}});
  const auto deep = make_run_data(config_, {.train = source(24), .held_out = nested, .vocab_size = 16});
  ASSERT_EQ(deep->held_out_sets().size(), 3u);
  EXPECT_EQ(deep->held_out_sets()[1].name, "all/short");
  EXPECT_DOUBLE_EQ(deep->held_out_sets()[1].weight, 0.125);
  config_.train.epochs = 1;
  EXPECT_NE(
      test::failure_of<ConfigError>([&] { make_run_data(config_, {.train = mixture, .vocab_size = 16}); }),
      "");
}

/// Exceptions of the program's functions go on as they are, and a line says which function it was.
TEST_F(ProgramRun, SaysWhichFunctionHasThrown) {
  const auto said_of = [&](const std::string& fails) {
    fails_ = fails;
    ::testing::internal::CaptureStderr();
    EXPECT_THROW(run_program(1, false), std::out_of_range) << fails;
    return ::testing::internal::GetCapturedStderr();
  };
  for (const auto& [fails, words] : {std::pair<std::string, std::string>{"open", "open_data()"},
                                     {"add", "add() of the metric 'right'"},
                                     {"value", "value() of the metric 'right'"},
                                     {"step", "on_step() after step 1 of a callback"},
                                     {"validation", "on_validation() after step 2 of a callback"},
                                     {"state", "state() of a callback"}}) {
    const std::string said = said_of(fails);
    EXPECT_NE(said.find(words + " of the program has thrown"), std::string::npos) << said;
  }
}

TEST_F(ProgramRun, WarnsOfMetricsThatAreGone) {
  config_.train.steps = 4;
  config_.checkpoint.every = 2;
  run_program(1, false, 2);
  without_metrics_ = true;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(run_program(1, true).summary.steps, 4);
  const std::string said = ::testing::internal::GetCapturedStderr();
  for (const char* name : {"right", "again", "minus"})
    EXPECT_NE(said.find(fmt::format("the metric \"{}\"", name)), std::string::npos) << said;
}

/// A score by which less was better says nothing where more is.
TEST_F(ProgramRun, TheBestOfTheOtherDirectionIsReplaced) {
  config_.train.steps = 4;
  config_.checkpoint.every = 2;
  config_.checkpoint.best = true;
  config_.train.monitor = "right";
  run_program(1, false, 2);
  const auto score = [&] { return std::stod(state::read_notes(options().best_weights_path).at("score")); };
  EXPECT_GE(score(), 0.0);
  fewer_is_better_ = true;
  run_program(1, true);
  EXPECT_LE(score(), 0.0) << "the share that is highest has stayed the best";
}

TEST_F(ProgramRun, ASetInWhichNothingCountsIsLeftOut) {
  config_.train.steps = 2;
  silent_ = true;
  for (const int64_t ranks : {1, 2}) {
    std::filesystem::remove_all(checkpoints());
    run_program(ranks, false);
    const StepRecord& last = recorder_.steps.back();
    ASSERT_TRUE(last.val_loss);
    EXPECT_EQ(*last.val_loss, last.val_metrics.at("loss/up"));
    EXPECT_FALSE(last.val_metrics.contains("loss/silent"));
    EXPECT_EQ(last.val_metrics.at("again"), last.val_metrics.at("again/up"));
  }
}

TEST_F(ProgramRun, ACallbackMayComeToARunThatHadNone) {
  run_program(1, false, 3);
  end_at_ = 10;
  const TrainResult resumed = run_program(1, true);
  EXPECT_EQ(resumed.summary.steps, 10);
  ASSERT_EQ(states_.size(), 1u);
  EXPECT_EQ(states_.begin()->substr(0, 3), "v4=") << "of the validation that nobody has heard of yet";
  EXPECT_NE(states_.begin()->find(" s5 "), std::string::npos) << *states_.begin();
  EXPECT_EQ(states_.begin()->find("s4 "), std::string::npos) << *states_.begin();
}

TEST_F(ProgramRun, NeedsAProgramAndATokenizerForASample) {
  config_.train.sample_tokens = 4;
  EXPECT_NE(test::failure_of<ConfigError>([&] { run_program(1, false); }).find("no tokenizer"),
            std::string::npos);
  config_.train.sample_tokens = 0;
  EXPECT_NE(test::failure_of<ConfigError>([&] { run(1, false); }).find("data.path=program"),
            std::string::npos);
}

TEST(EarlyStop, ForgetsTheValuesOfAnotherMetric) {
  EarlyStop loss({.early_stop = 2});
  loss.see(10, 0.1);
  EarlyStop accuracy({.early_stop = 2}, "accuracy", true);
  accuracy.restore(nlohmann::json::parse(loss.state().dump()), "x");
  EXPECT_EQ(accuracy.last_seen(), 0);
  for (const double value : {0.2, 0.4, 0.3}) accuracy.see(accuracy.last_seen() + 10, value);
  EXPECT_FALSE(accuracy.end());
  accuracy.see(40, 0.4);
  ASSERT_TRUE(accuracy.end());
  EXPECT_EQ(accuracy.end()->best_step, 20);
}

}  // namespace
}  // namespace trireme::train
