#include "trireme/report/console.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <limits>
#include <nlohmann/json.hpp>

#include "trireme/base/text.h"
#include "trireme/report/step_line.h"

namespace trireme::report {
namespace {

StepRecord some_step(int64_t step) {
  return {.step = step,
          .loss = 3.12066,
          .grad_norm = 1.921,
          .lr = 3e-3,
          .tokens = 40960,
          .tokens_per_s = 12300.0,
          .step_ms = 50.0,
          .peak_bytes = int64_t{61} << 20,
          .reserved_bytes = 0,
          .val_loss = {}};
}

const ConsoleOptions kOptions = {.total_steps = 400, .log_every = 10, .ranks = 2};

/// What `records` make the console print on stdout and stderr.
struct Captured {
  std::string out, err;
};

Captured show(const ConsoleOptions& options, const std::vector<StepRecord>& records) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  {
    const auto sink = make_console_sink(options);
    for (const StepRecord& record : records) sink->record(record);
  }
  return {.out = testing::internal::GetCapturedStdout(), .err = testing::internal::GetCapturedStderr()};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(StepLine, NamesEveryNumberWithItsUnit) {
  EXPECT_EQ(step_line(some_step(20), kOptions, 18.2),
            "step  20/400  loss 3.1207  gnorm  1.92  lr 3.0e-03  12.3k tok/s (6.15k/rank)   50.0 ms   20.0 "
            "steps/s  "
            "peak 61.0 MiB  eta 18 s");
}

// 0.123 TFLOP/s are 12.3 % of a peak of 1 TFLOP/s.
TEST(StepLine, HasFlopsAndMfuPerRankWhereTheyAreKnown) {
  ConsoleOptions options = kOptions;
  StepRecord record = some_step(1);
  EXPECT_FALSE(contains(step_line(record, options, {}), "FLOP"));
  record.tflops_per_rank = 0.123;
  EXPECT_TRUE(contains(step_line(record, options, {}), "  0.12 TFLOP/s/rank"));
  EXPECT_FALSE(contains(step_line(record, options, {}), "mfu"));
  options.peak_flops = 1e12;
  EXPECT_TRUE(contains(step_line(record, options, {}), "mfu 12.3%"));
}

TEST(StepLine, ColumnsStayAlignedOverTheUsualRange) {
  const size_t loss_column = step_line(some_step(1), kOptions, {}).find("loss");
  const size_t peak_column = step_line(some_step(1), kOptions, {}).find("peak");
  for (const int64_t step : {1, 9, 10, 99, 100, 400}) {
    for (const double scale : {1e-3, 0.1, 1.0, 3.0, 100.0}) {
      StepRecord record = some_step(step);
      record.loss *= scale;
      record.grad_norm *= scale;
      record.step_ms *= scale;
      record.tokens_per_s /= scale;
      const std::string line = step_line(record, kOptions, {});
      EXPECT_EQ(line.find("loss"), loss_column) << line;
      EXPECT_EQ(line.find("peak"), peak_column) << line;
    }
  }
}

TEST(StepLine, SaysNanInsteadOfHidingIt) {
  StepRecord record = some_step(1);
  record.loss = std::numeric_limits<double>::quiet_NaN();
  record.grad_norm = std::numeric_limits<double>::infinity();
  const std::string line = step_line(record, kOptions, {});
  EXPECT_TRUE(contains(line, "loss    NaN")) << line;
  EXPECT_TRUE(contains(line, "gnorm   Inf")) << line;
}

TEST(StepLine, ShowsMemoryOfTheAllocatorAndValidationWhenThereAre) {
  StepRecord record = some_step(1);
  record.active_bytes = int64_t{70} << 20;
  record.reserved_bytes = int64_t{80} << 20;
  record.val_loss = 2.5;
  const std::string line = step_line(record, kOptions, {});
  EXPECT_TRUE(contains(line, "peak 61.0 MiB (70.0 MiB active, 80.0 MiB reserved)")) << line;
  EXPECT_TRUE(line.ends_with("  val 2.5000")) << line;
}

TEST(ProgressBar, NeverExceedsTheTerminal) {
  for (int64_t columns = 0; columns < 100; ++columns) {
    EXPECT_LE(progress_bar(some_step(200), 400, 18.0, columns).size(), static_cast<size_t>(columns));
  }
}

TEST(ProgressBar, FillsInProportion) {
  EXPECT_TRUE(progress_bar(some_step(1), 400, {}, 80).starts_with("[....................]"));
  EXPECT_TRUE(progress_bar(some_step(200), 400, {}, 80).starts_with("[##########..........]"));
  EXPECT_TRUE(progress_bar(some_step(400), 400, {}, 80).starts_with("[####################]"));
  EXPECT_TRUE(progress_bar(some_step(500), 400, {}, 80).starts_with("[####################]"));
}

TEST(Console, PrintsFirstEveryNthValidatedAndLastStep) {
  ConsoleOptions options = kOptions;
  options.total_steps = 25;
  std::vector<StepRecord> records;
  for (int64_t i = 1; i <= 25; ++i) records.push_back(some_step(i));
  records[12].val_loss = 2.0;  // step 13

  const auto lines = split(show(options, records).out, '\n');
  const std::vector<std::string> expected = {"step  1/25", "step 10/25", "step 13/25", "step 20/25",
                                             "step 25/25"};
  ASSERT_EQ(lines.size(), expected.size() + 1);
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(lines[i].starts_with(expected[i])) << lines[i];
}

// 50 ms for all steps but one of 10 s: the median stays 50 ms, so 390 steps to go take 19.5 s.
TEST(Console, EtaIsNotMovedByOneSlowStep) {
  std::vector<StepRecord> records;
  for (int64_t i = 1; i <= 10; ++i) records.push_back(some_step(i));
  records[4].step_ms = 10000.0;
  const std::string out = show(kOptions, records).out;
  EXPECT_TRUE(contains(out, "eta 20 s")) << out;
}

TEST(Console, LastStepHasNoEta) {
  EXPECT_FALSE(contains(show(kOptions, {some_step(400)}).out, "eta"));
}

TEST(Console, DrawsABarOnATerminalOnlyAndCleansUpBehindIt) {
  ConsoleOptions options = kOptions;
  const std::vector<StepRecord> records = {some_step(1), some_step(2)};
  EXPECT_EQ(show(options, records).err, "");
  options.bar_columns = [] { return 80; };
  const std::string err = show(options, records).err;
  EXPECT_TRUE(contains(err, "] ")) << err;
  EXPECT_TRUE(err.ends_with("\r\x1b[K")) << err;
  EXPECT_EQ(show(options, records).out, show(kOptions, records).out);
  options.quiet = true;
  EXPECT_EQ(show(options, records).err, "");
}

TEST(Console, TheBarFollowsTheWidthOfTheTerminal) {
  ConsoleOptions options = kOptions;
  int64_t columns = 80;
  options.bar_columns = [&] { return columns; };
  const auto bar_of = [&](int64_t wide) {
    columns = wide;
    const std::string err = show(options, {some_step(2)}).err;
    return err.substr(1, err.find("\x1b[K") - 1);
  };
  const std::string full = bar_of(80);
  EXPECT_GT(full.size(), 50u) << full;
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const auto sink = make_console_sink(options);
  columns = 30;  // after the console was made
  sink->record(some_step(2));
  testing::internal::GetCapturedStdout();
  EXPECT_TRUE(contains(testing::internal::GetCapturedStderr(), "\r" + full.substr(0, 29) + "\x1b[K"));
}

/// A step as a GPU's, with all that a line can say.
StepRecord long_step(int64_t step) {
  StepRecord record = some_step(step);
  record.tflops_per_rank = 0.0421;
  record.active_bytes = record.reserved_bytes = int64_t{80} << 20;
  record.val_loss = 2.5;
  return record;
}

TEST(Console, StepLinesFitIntoAnyTerminal) {
  ConsoleOptions options = kOptions;
  const std::string full = show(options, {long_step(20)}).out;
  size_t before = 0;
  for (int64_t columns = 42; columns < std::ssize(full) + 2; ++columns) {
    options.line_columns = [columns] { return columns; };
    const std::string line = show(options, {long_step(20)}).out;
    EXPECT_LE(std::ssize(line) - 1, columns) << line;
    EXPECT_GE(line.size(), before) << "more room, no fewer words";
    before = line.size();
    EXPECT_TRUE(line.starts_with("step  20/400  loss 3.1207") && line.ends_with("  val 2.5000\n")) << line;
  }
  EXPECT_EQ(before, full.size());
  options.line_columns = [] { return 80; };
  EXPECT_EQ(show(options, {long_step(20)}).out,
            "step  20/400  loss 3.1207  12.3k tok/s   50.0 ms  eta 19 s  val 2.5000\n");
  options.line_columns = {};
  EXPECT_EQ(show(options, {long_step(20)}).out, full);
}

TEST(Console, ColumnsStayWhereTheyAreOnceALineHadNoRoom) {
  ConsoleOptions options = kOptions;
  int64_t columns = 150;
  options.line_columns = [&] { return columns; };
  StepRecord plain = long_step(20);
  plain.val_loss.reset();
  plain.active_bytes = plain.reserved_bytes = 0;
  testing::internal::CaptureStdout();
  const auto sink = make_console_sink(options);
  for (const StepRecord& record : {plain, long_step(20), plain}) sink->record(record);
  columns = 200;
  sink->record(plain);
  const auto lines = split(testing::internal::GetCapturedStdout(), '\n');
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_LT(lines[2].size(), lines[0].size());
  EXPECT_TRUE(lines[1].starts_with(lines[2])) << lines[1] << "\n" << lines[2];
  EXPECT_EQ(lines[3], lines[0]) << "the terminal is wider";
}

TEST(StepLine, KeepsItsColumnsHoweverFewFlopsThereAre) {
  const auto place_of = [](double tflops) {
    StepRecord record = some_step(20);
    record.tflops_per_rank = tflops;
    return step_line(record, kOptions, {}).find("TFLOP/s");
  };
  for (const double tflops : {2e-5, 0.0005, 0.0099, 0.0101, 0.5, 31.25, 412.0})
    EXPECT_EQ(place_of(tflops), place_of(1.0)) << tflops;
  StepRecord slow = some_step(20);
  slow.tflops_per_rank = 0.0099;
  EXPECT_TRUE(contains(step_line(slow, kOptions, {}), " 0.010 TFLOP/s/rank"));
}

TEST(Console, EndsWithWhereTheWeightsAre) {
  ConsoleOptions options = kOptions;
  options.run = "/runs/tiny";
  RunSummary summary;
  summary.steps = 400;
  summary.weights_path = "/runs/tiny/checkpoints/final/model.safetensors";
  const auto end_of = [&] {
    testing::internal::CaptureStdout();
    make_console_sink(options)->finish(summary);
    return testing::internal::GetCapturedStdout();
  };
  EXPECT_TRUE(contains(end_of(), "\nweights /runs/tiny/checkpoints/final/model.safetensors\n")) << end_of();
  summary.weights_path = "";
  EXPECT_TRUE(contains(end_of(), "\nrun     /runs/tiny, without weights")) << end_of();
}

TEST(Console, AnInterruptedRunSaysWhereItStandsAndHowToGoOn) {
  ConsoleOptions options = kOptions;
  options.run = "/runs/tiny";
  RunSummary summary;
  summary.steps = 57;
  summary.wall_s = 2.6;
  summary.stop_signal = SIGINT;
  summary.weights_path = "/runs/tiny/checkpoints/final/model.safetensors";
  testing::internal::CaptureStdout();
  make_console_sink(options)->finish(summary);
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(out.starts_with("interrupted by SIGINT after step 57 of 400, in 2.60 s  loss ")) << out;
  for (const char* part : {"\nweights /runs/tiny/checkpoints", "'trireme generate /runs/tiny'",
                           "'trireme train /runs/tiny/config.yaml' trains again, from step 1"})
    EXPECT_TRUE(contains(out, part)) << part << " in:\n" << out;
}

TEST(Console, AnInterruptedRunWithCheckpointsGoesOn) {
  ConsoleOptions options = kOptions;
  options.run = "/runs/tiny";
  RunSummary summary;
  summary.stop_signal = SIGTERM;
  summary.checkpoints = 1;
  testing::internal::CaptureStdout();
  make_console_sink(options)->finish(summary);
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(contains(out, "'trireme train --resume /runs/tiny' continues")) << out;
  for (const int64_t checkpoints : {1, 0}) {
    summary.checkpoints = checkpoints;
    EXPECT_TRUE(contains(whereabouts(summary, "/runs/tiny", false, 4),
                         checkpoints > 0 ? "'trireme train --resume /runs/tiny -n 4' continues"
                                         : "'trireme train /runs/tiny/config.yaml -n 4' trains again"));
  }
}

TEST(Console, SaysWhyARunEndedEarly) {
  RunSummary summary;
  summary.weights_path = "/w";
  EXPECT_FALSE(contains(whereabouts(summary, "/runs/tiny"), "early"));
  summary.early_end = {.step = 40, .best_step = 20, .best_value = 2.011, .validations = 2};
  EXPECT_TRUE(contains(whereabouts(summary, "/runs/tiny"),
                       "\nearly   ended after step 40: the validation loss was 2.0110 after step 20, and no "
                       "lower in the 2 validations since (train.early_stop)"));
  summary.early_end = {.step = 10, .best_step = 0, .best_value = {}, .validations = 1};
  EXPECT_TRUE(contains(whereabouts(summary, "/runs/tiny"), "was not finite in the 1 validation since"));
}

TEST(Console, AnInterruptedRunOnImagesContinuesNoText) {
  RunSummary summary;
  summary.stop_signal = SIGTERM;
  summary.checkpoints = 1;
  summary.weights_path = "/runs/tiny/checkpoints/final/model.safetensors";
  EXPECT_TRUE(contains(whereabouts(summary, "/runs/tiny"), "trireme generate"));
  const std::string text = whereabouts(summary, "/runs/tiny", true);
  EXPECT_FALSE(contains(text, "trireme generate")) << text;
  EXPECT_TRUE(contains(text, "\nnext    'trireme train --resume /runs/tiny' continues")) << text;
}

TEST(Console, JsonIsOneObjectAStepAndNothingElse) {
  ConsoleOptions options = kOptions;
  options.json = true;
  options.bar_columns = [] { return 80; };
  const Captured captured = show(options, {some_step(1), some_step(2), some_step(3)});
  const auto lines = split(captured.out, '\n');
  ASSERT_EQ(lines.size(), 4u);
  for (size_t i = 0; i < 3; ++i) {
    const auto line = nlohmann::json::parse(lines[i]);
    EXPECT_EQ(line["step"], i + 1);
    EXPECT_EQ(line["schema"], "trireme.train/1");
    EXPECT_EQ(line["type"], "step");
  }
  EXPECT_EQ(captured.err, "");
}

TEST(Console, TheSummaryInJsonNamesItsRun) {
  ConsoleOptions options = kOptions;
  options.json = true;
  options.run = "/runs/a \"b\"";
  testing::internal::CaptureStdout();
  make_console_sink(options)->finish(RunSummary{});
  const auto line = nlohmann::json::parse(testing::internal::GetCapturedStdout());
  EXPECT_EQ(line["schema"], "trireme.train/1");
  EXPECT_EQ(line["type"], "summary");
  EXPECT_EQ(line["run"], options.run);
}

TEST(Console, AStandardOutputThatNobodyReadsIsOneWarningAndNoError) {
  for (const bool json : {false, true}) {
    ConsoleOptions options = kOptions;
    options.json = json;
    options.on_lost = [] { ADD_FAILURE() << "nobody has lost anything"; };
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    ::close(ends[0]);
    const auto old = ::signal(SIGPIPE, SIG_IGN);
    const int out = ::dup(STDOUT_FILENO);
    testing::internal::CaptureStderr();
    ::dup2(ends[1], STDOUT_FILENO);
    {
      const auto sink = make_console_sink(options);
      EXPECT_NO_THROW(sink->record(some_step(1)));
      EXPECT_NO_THROW(sink->record(some_step(10)));
      EXPECT_NO_THROW(sink->finish({}));
    }
    ::dup2(out, STDOUT_FILENO);
    ::signal(SIGPIPE, old);
    for (const int fd : {out, ends[1]}) ::close(fd);
    EXPECT_EQ(split(testing::internal::GetCapturedStderr(), '\n').size(), 2u) << "a line and what follows it";
  }
}

TEST(Console, AFullStandardOutputIsOneWarningAndTold) {
  int told = 0;
  ConsoleOptions options = kOptions;
  options.on_lost = [&] { ++told; };
  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC), out = ::dup(STDOUT_FILENO);
  testing::internal::CaptureStderr();
  ::dup2(full, STDOUT_FILENO);
  {
    const auto sink = make_console_sink(options);
    sink->record(some_step(1));
    sink->finish({});
  }
  ::dup2(out, STDOUT_FILENO);
  for (const int fd : {out, full}) ::close(fd);
  EXPECT_EQ(split(testing::internal::GetCapturedStderr(), '\n').size(), 2u) << "a line and what follows it";
  EXPECT_EQ(told, 1);
}

TEST(Console, CountsTheStepsOfThisAttempt) {
  RunSummary summary;
  summary.wall_s = 0.301;
  const auto line_of = [&](int64_t resumed_at, int64_t steps) {
    summary.resumed_at = resumed_at;
    summary.steps = steps;
    const std::string line = done_line(summary, 28);
    return line.substr(0, line.find("  "));
  };
  EXPECT_EQ(line_of(0, 28), "done 28 steps in 301 ms");
  EXPECT_EQ(line_of(0, 1), "done 1 step in 301 ms");
  EXPECT_EQ(line_of(15, 28), "done 13 steps (16 to 28) in 301 ms");
  EXPECT_EQ(line_of(27, 28), "done 1 step (28) in 301 ms");
  EXPECT_EQ(line_of(28, 28), "done 0 steps (28 was the last) in 301 ms");
}

TEST(Console, SaysWhenAnEqualRunMayEndWithAnotherDigest) {
  testing::internal::CaptureStdout();
  RunSummary summary;
  summary.weights_digest = "0123456789abcdef";
  summary.why_bits_vary = "attention adds in an order that varies";
  make_console_sink(kOptions)->finish(summary);
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(contains(out, "weights 0123456789abcdef (bits may vary)\n")) << out;
}

TEST(Console, EndsWithTheSummaryAndTheSample) {
  testing::internal::CaptureStdout();
  RunSummary summary;
  summary.steps = 400;
  summary.final_loss = 2.0;
  summary.wall_s = 9.4;
  summary.weights_digest = "0123456789abcdef";
  summary.sample = "int main\x1b[2J";
  make_console_sink(kOptions)->finish(summary);
  const std::string out = testing::internal::GetCapturedStdout();
  EXPECT_TRUE(out.starts_with("done 400 steps in 9.40 s  loss 2.0000")) << out;
  EXPECT_TRUE(contains(out, "weights 0123456789abcdef\n")) << out;
  EXPECT_TRUE(contains(out, "int main?[2J"))
      << "an escape sequence of a sample must not reach the terminal: " << out;
}

}  // namespace
}  // namespace trireme::report
