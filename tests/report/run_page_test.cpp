#include "trireme/report/run_page.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "tests/report/html_check.h"
#include "tests/report/temporary_folder.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/plan/config.h"
#include "trireme/report/classification_view.h"
#include "trireme/report/html.h"
#include "trireme/report/page.h"
#include "trireme/report/run_figures.h"
#include "trireme/report/run_layout.h"

namespace trireme::report {
namespace {

const PageOptions kPage = {
    .meaning = [](int code) { return std::string_view(code == 5 ? " (lost a peer)" : ""); }};

std::string yaml_of(std::vector<std::string> overrides) {
  return plan::to_yaml(plan::load({.overrides = std::move(overrides)}, Environment()), true);
}

/// A run directory made by what makes those of real runs.
class RunPage : public ::testing::Test {
 protected:
  RunDirectory make(const std::string& name, std::vector<std::string> overrides = {}) {
    overrides.push_back("name=" + name);
    overrides.emplace_back("train.steps=40");
    Manifest manifest = of_ranks(2);
    manifest.config_yaml = yaml_of(std::move(overrides));
    return RunDirectory::create(root_.path(), name, manifest);
  }

  static Manifest of_ranks(int64_t ranks) {
    return {.command = fmt::format("trireme train -n {}", ranks),
            .config_yaml = "",
            .device = "cpu",
            .mesh = fmt::format("dp_shard={}", ranks),
            .ranks = ranks};
  }

  static void go_on(const RunDirectory& run, int64_t ranks = 2) {
    run.begin_attempt(std::ssize(run.attempts()) + 1, of_ranks(ranks));
  }

  static StepRecord step(int64_t number) {
    StepRecord record;
    record.step = number;
    record.loss = 5.0 / static_cast<double>(number);
    record.grad_norm = 1.0;
    record.lr = 3e-4;
    record.tokens = 2048 * number;
    record.tokens_per_s = number <= 10 ? 1000.0 : 20'000.0;
    record.step_ms = number <= 10 ? 2048.0 : 102.4;
    record.peak_bytes = 300 << 20;
    record.communication_ms = 8.0;
    record.exposed_ms = 5.12;
    if (number % 10 == 0) record.val_loss = record.loss + 0.1;
    return record;
  }

  static RunSummary summary() {
    RunSummary summary;
    summary.steps = 40;
    summary.final_loss = 0.125;
    summary.tokens_per_s = 20'000.0;
    summary.steps_per_s = 9.77;
    summary.peak_bytes = 310 << 20;
    summary.wall_s = 47.4;
    summary.weights_digest = "0123456789abcdef";
    summary.cost.predicted = summary.cost.measured = {1 << 20, 2 << 20, 4 << 20};
    summary.cost.predicted_peak_bytes = 290 << 20;
    summary.cost.measured_activation_bytes = 33 << 20;
    return summary;
  }

  /// Records steps `first` to `last`.
  static void record(const RunDirectory& run, int64_t first, int64_t last) {
    const auto sink = make_run_files_sink(run);
    if (first > 1) sink->resume(first - 1);
    for (int64_t number = first; number <= last; ++number) sink->record(step(number));
  }

  RunDirectory finished(const std::string& name, std::vector<std::string> overrides = {}) {
    RunDirectory run = make(name, std::move(overrides));
    record(run, 1, 40);
    make_run_files_sink(run)->finish(summary());
    run.finish(0);
    return run;
  }

  /// The page, which must be well-formed and complete in itself.
  static std::string page_of(const std::vector<RunDirectory>& runs) {
    std::vector<RunRecord> records;
    for (const RunDirectory& run : runs) records.push_back(read_run(run.path()));
    std::string page = run_page(records, kPage);
    HtmlCheck check(page);
    EXPECT_EQ(check.problem(), "");
    EXPECT_EQ(check.tags().count("script") + check.tags().count("link") + check.tags().count("iframe"), 0u);
    for (const std::string& attribute : check.attributes()) {
      const bool loads = attribute.starts_with("src=") || attribute.starts_with("href=") ||
                         attribute.find("url(") != std::string::npos;
      const bool inside =
          attribute.starts_with("src=\"data:") || attribute.starts_with("href=\"data:image/png;base64,");
      EXPECT_TRUE(!loads || inside) << attribute.substr(0, 80);
      EXPECT_FALSE(attribute.starts_with("on")) << attribute.substr(0, 80);
    }
    return page;
  }

  static bool says(const std::string& page, const std::string& text) {
    return page.find(Markup(text).html()) != std::string::npos;
  }

  TemporaryFolder root_;
};

TEST_F(RunPage, SaysWhatARunWasAndHowItEnded) {
  const std::string page = page_of({finished("tiny", {"train.global_batch=8", "optim.lr=2e-3"})});
  for (const char* text : {"tiny",
                           "finished",
                           "40 of 40 steps in 47.4 s",
                           "trireme train -n 2",
                           "0123456789abcdef",
                           "an identical run gives the same bits",
                           "20.0k",
                           "102 ms",
                           "310 MiB",
                           "of the largest rank; predicted 290 MiB",
                           "8 = micro-batch 4 x accumulation 1 x 2 data-parallel ranks",
                           "validation loss",
                           "Learning rate",
                           "Gradient norm",
                           "Distribution of step times",
                           "Throughput",
                           "Memory",
                           "Communication",
                           "Exposed communication",
                           "5.0%",
                           "optimizer state",
                           "optim.lr",
                           "0.002",
                           "--optim.lr",
                           "dp_shard=2"}) {
    EXPECT_TRUE(says(page, text)) << text;
  }
  for (const char* text :
       {"Loss scale", "Checkpoint stalls", "Validation accuracy", "Last log lines", "Pictures"})
    EXPECT_FALSE(says(page, text)) << text << ": this run has none";
}

TEST_F(RunPage, SaysWhyARunEndedEarly) {
  const RunDirectory run = make("early");
  record(run, 1, 40);
  RunSummary ended = summary();
  ended.early_end = {.step = 40, .best_step = 20, .best_value = 2.5, .validations = 2};
  make_run_files_sink(run)->finish(ended);
  run.finish(0);
  EXPECT_TRUE(says(page_of({run}), "the validation loss was 2.5000 after step 20"));
  EXPECT_FALSE(says(page_of({finished("whole")}), "early stop"));
}

TEST_F(RunPage, FiguresAreThoseAfterTheWarmUp) {
  const RunFigures figures = figures_of(read_run(finished("tiny").path()));
  EXPECT_EQ(figures.steps, 40);
  EXPECT_EQ(figures.timed_steps, 30);
  EXPECT_EQ(figures.tokens_per_s, 20'000.0);
  EXPECT_EQ(figures.step_ms, 102.4);
  EXPECT_TRUE(says(page_of({finished("named")}), "90% of this run's steps: 20.0k to 20.0k"));
  EXPECT_NEAR(*figures.exposed_share, 0.05, 1e-12);
  EXPECT_EQ(figures.val_loss->step, 40.0);
  EXPECT_EQ(figures.peak_bytes, 310 << 20);
  EXPECT_EQ(figures.tokens, 2048 * 40);
}

TEST_F(RunPage, ShowsAttemptsCausesAndCrashReports) {
  const auto run = make("crashed");
  record(run, 1, 25);
  run.finish({.exit_code = 137, .cause = "rank 1 (pid 7) was killed by signal 9 (SIGKILL)", .rank = 1});
  write_file_atomic(run.file("crash-1.txt"), "rank 0: all_gather #41 & <waiting>\n");
  write_file_atomic(run.file("logs/rank-1.log"), "the last words\n");
  go_on(run);
  run.note_resumed(20);
  record(run, 21, 30);
  run.finish({.exit_code = 5, .cause = "rank 0 lost rank 1", .rank = 1});
  const std::string page = page_of({run});
  for (const char* text : {"failed", "30 of 40 steps, exit code 5 (lost a peer)", "rank 0 lost rank 1",
                           "rank 1 (pid 7) was killed by signal 9 (SIGKILL)", "exit code 137", "crash-1.txt",
                           "all_gather #41 & <waiting>", "the end of logs/rank-1.log", "the last words",
                           "attempt 2 continued after step 20"})
    EXPECT_TRUE(says(page, text)) << text;
  EXPECT_EQ(figures_of(read_run(run.path())).timed_steps, 15) << "25 - 5 lost - 10, and half of 10";
}

TEST_F(RunPage, AFailedRunNamesItsErrorAndHowToGoOn) {
  const auto run = make("diverged");
  record(run, 1, 25);
  run.finish({.exit_code = 6, .cause = "rank 1 exited with code 6", .rank = 1});
  const std::string error = "[train.step] step 26: the gradient of head.weight is NaN; lower optim.lr";
  write_file_atomic(run.file("logs/rank-0.log"), "12:00:01 error: rank 1 is gone\n");
  write_file_atomic(run.file("logs/rank-1.log"),
                    "12:00:00 error: an earlier one\n12:00:01 error: " + error + "\n12:00:01 ended\n");
  std::string page = page_of({run});
  EXPECT_TRUE(says(page, error));
  EXPECT_NE(page.find("<p class=\"cause\">" + Markup(error).html()), std::string::npos)
      << "not in a log alone";
  EXPECT_TRUE(says(page, again_command(run.path(), 2)));
  make_directories(run.file("checkpoints/step-20"));
  run.finish({.exit_code = 6, .cause = "", .error = "[comm] as the launcher noted it", .rank = 1});
  page = page_of({run});
  EXPECT_NE(page.find("<p class=\"cause\">[comm] as the launcher noted it"), std::string::npos);
  EXPECT_TRUE(says(page, resume_command(run.path(), 2)));
  EXPECT_EQ(page.find("<p class=\"cause\">" + Markup(error).html()), std::string::npos);
}

TEST_F(RunPage, ShowsTheLayoutThatTheLastAttemptHadAndThoseBefore) {
  const auto run = make("wider", {"train.global_batch=8"});
  record(run, 1, 20);
  run.finish(75);
  go_on(run, 4);
  record(run, 21, 40);
  run.finish(0);
  const std::string page = page_of({run});
  for (const char* text : {"4 on cpu, mesh dp_shard=4", "x 4 data-parallel ranks", "trireme train -n 2",
                           "trireme train -n 4", "2, dp_shard=2", "4, dp_shard=4"})
    EXPECT_TRUE(says(page, text)) << text;
}

TEST_F(RunPage, AnInterruptedRunCanGoOnAndARunningOneHasNoEnd) {
  const auto run = make("stopped");
  record(run, 1, 12);
  EXPECT_TRUE(says(page_of({run}), "it is still running, or was killed together with its launcher"));
  run.finish(75);
  const std::string page = page_of({run});
  EXPECT_TRUE(says(page, "interrupted"));
  EXPECT_TRUE(says(page, "12 of 40 steps, exit code 75"));
}

TEST_F(RunPage, IsMadeOfWhateverThereIs) {
  const auto run = make("bare");
  EXPECT_TRUE(says(page_of({run}), "No step was recorded."));
  record(run, 1, 1);
  page_of({run});
  for (const char* file : {"config.yaml", "metrics.jsonl"}) std::filesystem::remove(run.file(file));
  EXPECT_TRUE(says(page_of({run}), "there is no config.yaml"));
  write_file_atomic(run.file("metrics.jsonl"), "");
  write_file_atomic(run.file("summary.json"), "{\"steps\": ");
  write_file_atomic(run.file("config.yaml"), "optim:\n  unheard_of: 3\n");
  const std::string page = page_of({run});
  EXPECT_TRUE(says(page, "summary.json is damaged"));
  EXPECT_TRUE(says(page, "unheard_of")) << "the config of another version is shown all the same";
}

TEST_F(RunPage, NamesDamagedLinesAndUsesTheOthers) {
  const auto run = make("damaged");
  const std::string path = run.file("metrics.jsonl");
  std::string text;
  for (int64_t number = 1; number <= 30; ++number) {
    text += to_json_line(step(number)) + "\n";
    if (number == 4) text += "{\"step\": 5, \"lo\n\n[1]\n{\"loss\": 3}\n";
  }
  write_file_atomic(path, text + "{\"step\": 31, \"loss\": 0.1");
  const std::string page = page_of({run});
  EXPECT_TRUE(says(page,
                   "metrics.jsonl: 4 lines are damaged and left out: line 5 is not JSON, line 6 is empty, "
                   "line 7 is not an object, line 8 has no step."));
  EXPECT_TRUE(says(page, "metrics.jsonl ends inside a line"));
  const Metrics metrics = read_metrics(path);
  EXPECT_EQ(metrics.steps.size(), 30u);
  EXPECT_EQ(metrics.damaged_lines, 4);
}

TEST_F(RunPage, OfStepsMadeTwiceTheLaterCounts) {
  const auto run = make("again");
  std::string text;
  for (const int64_t number : {1, 2, 3, 4, 3, 4, 5}) {
    StepRecord record = step(number);
    record.loss = static_cast<double>(text.size());
    text += to_json_line(record) + "\n";
  }
  write_file_atomic(run.file("metrics.jsonl"), text);
  const Metrics metrics = read_metrics(run.file("metrics.jsonl"));
  EXPECT_EQ(metrics.steps, (std::vector<double>{1, 2, 3, 4, 5}));
  EXPECT_TRUE(std::ranges::is_sorted(metrics.curve("loss").y)) << "those of the first pass are gone";
  EXPECT_TRUE(says(page_of({run}), "2 steps that were repeated later"));
}

TEST_F(RunPage, LossesThatAreNotFiniteAreShownAsSuch) {
  const auto run = make("nan");
  {
    const auto sink = make_run_files_sink(run);
    for (int64_t number = 1; number <= 20; ++number) {
      StepRecord record = step(number);
      record.loss_scale = number < 7 ? 65536.0 : 32768.0;
      if (number == 6) {
        record.skipped = true;
        record.grad_norm = std::numeric_limits<double>::infinity();
      }
      if (number == 20) record.loss = std::nan("");
      sink->record(record);
    }
  }
  run.finish(6);
  const std::string page = page_of({run});
  EXPECT_TRUE(says(page, "Loss scale"));
  EXPECT_TRUE(says(page, "One step was skipped because gradients overflowed: step 6."));
  EXPECT_TRUE(says(page, "NaN"));
  EXPECT_TRUE(says(page, "1 value is not finite"));
}

TEST_F(RunPage, KeysOfOtherKindsOfTrainingHaveCurves) {
  const auto run = make("images");
  LineFile metrics(run.file("metrics.jsonl"));
  for (int i = 1; i <= 5; ++i) {
    metrics.append(
        fmt::format("{{\"step\": {}, \"loss\": 1, \"val_top1\": 0.{}5, \"val_top5\": 0.99, \"tokens\": 64, "
                    "\"tokens_per_s\": 900, \"ema_decay\": 0.9, \"note\": \"x\"}}",
                    i, i));
  }
  const std::string page = page_of({run});
  EXPECT_FALSE(says(page, "tokens/s"));
  for (const char* text : {"nats per image", "images/s of all ranks", "64 images", "Validation accuracy",
                           "top-1 at step 3: 35.0%", "top-5 at step 3: 99.0%", "top-1 accuracy", "55.0%",
                           "ema decay at step 3", "Ema decay"})
    EXPECT_TRUE(says(page, text)) << text;
}

TEST_F(RunPage, KnowsWhatEveryRunRecordsAndReadsTheRest) {
  const auto run = make("compute");
  {
    const auto sink = make_run_files_sink(run);
    for (int64_t number = 1; number <= 20; ++number) {
      StepRecord record = step(number);
      record.tflops_per_rank = 0.0625;
      sink->record(record);
    }
  }
  LineFile(run.file("metrics.jsonl"))
      .append("{\"step\": 21, \"loss\": 1, \"reward_margin\": 2, \"queue_ms\": 1500}");
  const std::string page = page_of({run});
  for (const char* text : {"Compute", "TFLOP/s of one rank", "TFLOP/s at step 3: 0.0625", "Reward margin",
                           "reward margin at step 21", "Queue", "queue at step 21: 1.50 s"})
    EXPECT_TRUE(says(page, text)) << text;
  EXPECT_FALSE(says(page, "tflops_per_rank"));
}

TEST_F(RunPage, TopFiveOfFiveClassesIsNotShown) {
  for (const int classes : {5, 6}) {
    const auto run = make("classes", {"model.preset=lenet", fmt::format("model.classes={}", classes)});
    {
      const auto sink = make_run_files_sink(run);
      StepRecord record = step(10);
      record.val_top1 = 0.5;
      record.val_top5 = 1.0;
      sink->record(record);
    }
    for (const std::string& page : {page_of({run}), page_of({run, finished("other")})})
      EXPECT_EQ(says(page, "top-5"), classes > 5) << classes;
  }
}

TEST_F(RunPage, OfOneStepThereIsNoDistribution) {
  const auto run = make("short");
  record(run, 1, 1);
  const std::string page = page_of({run});
  EXPECT_TRUE(says(page, "of one step"));
  for (const char* text : {"Distribution of step times", "median of 1", "90% of this run's"})
    EXPECT_FALSE(says(page, text)) << text;
}

TEST_F(RunPage, ARunOfEpochsHasTheStepsThatItsDataMakes) {
  const auto run = make("epochs", {"model.preset=lenet", "train.epochs=2"});
  record(run, 1, 60);
  run.finish(0);
  EXPECT_TRUE(says(page_of({run}), "60 steps"));
  EXPECT_FALSE(says(page_of({run}), "60 of ")) << "train.steps is not asked for";
}

TEST_F(RunPage, NothingThatARunIsCalledRuns) {
  const std::string evil = "<script>alert(1)</script>";
  const auto run = finished("x", {"name=" + evil, "data.path=\"" + evil + "'"});
  write_file_atomic(run.file("crash-1.txt"), evil);
  make_directories(run.file("pictures"));
  write_file_atomic(run.file("pictures/<img src=x onerror=alert(1)>.svg"),
                    "<svg><script>alert(1)</script></svg>");
  const auto other = finished("y", {"name=" + evil});
  for (const std::string& page : {page_of({run}), page_of({run, other})}) {
    EXPECT_EQ(page.find("<script"), std::string::npos);
    EXPECT_EQ(page.find("<img src=x"), std::string::npos);
  }
}

TEST_F(RunPage, PicturesOfTheRunAreInside) {
  const auto run = finished("pictured");
  const std::string png = "\x89PNG\r\n\x1a\n and so on";
  make_directories(run.file("pictures"));
  make_directories(run.file("traces"));
  write_file_atomic(run.file("pictures/confusion.png"), png);
  write_file_atomic(run.file("pictures/broken.png"), "no PNG");
  write_file_atomic(run.file("pictures/notes.txt"), "no picture");
  const std::string svg = "<svg viewBox=\"0 0 9 9\"><text>F0</text></svg>";
  write_file_atomic(run.file("traces/pipeline.svg"), svg);
  const std::string page = page_of({run});
  EXPECT_NE(page.find("data:image/png;base64," + base64(png)), std::string::npos);
  EXPECT_NE(page.find(svg), std::string::npos);
  EXPECT_TRUE(says(page, "pictures/broken.png is not a PNG."));
  EXPECT_FALSE(says(page, "notes.txt"));
}

TEST_F(RunPage, PicturesOfImagesHaveTitlesAndTheirOwnText) {
  const auto run = finished("digits");
  Classification all;
  all.classes = {"<cat>", "dog"};
  all.confusion = {4, 1, 0, 5};
  all.images = 10;
  all.right = 9;
  all.worst = {{.sample = 3, .truth = 0, .guess = 1, .loss = 2.0}};
  all.worst[0].picture = {.width = 1, .height = 1, .channels = 1, .pixels = {7}};
  write_classification(all, run);
  const std::string page = page_of({run});
  for (const char* text : {"Confusion matrix", "pictures/confusion.svg", "Worst mistakes",
                           "9 of 10 held-out images are classified correctly (90.0%), after step 0",
                           "<cat> predicted as dog: 1 of 5 (20.0%)", "The one mistake among 10"})
    EXPECT_TRUE(says(page, text)) << text;
}

TEST_F(RunPage, CurvesAreDrawnOnceWhateverPicturesThereAre) {
  const auto run = finished("curved");
  make_curves_sink(run, "curved")->finish(summary());
  const std::string svg = read_file(run.file("pictures/curves.svg"));
  for (const char* text : {">curved<", ">Loss<", "validation loss at step 40: ", ">Learning rate<",
                           ">Gradient norm<", ">Step time<", ">Throughput<"})
    EXPECT_NE(svg.find(text), std::string::npos) << text;
  EXPECT_EQ(svg.find("Validation accuracy"), std::string::npos) << "a text has none";
  const std::string page = page_of({run});
  EXPECT_FALSE(says(page, "curves.svg"));
  EXPECT_FALSE(says(page, "Pictures"));
}

TEST_F(RunPage, CurvesOfARunWithoutStepsAreNotThere) {
  const auto run = make("bare");
  make_curves_sink(run, "bare")->finish(RunSummary());
  make_run_files_sink(run);
  make_curves_sink(run, "bare")->finish(RunSummary());
  EXPECT_FALSE(std::filesystem::exists(run.file("pictures")));
}

TEST_F(RunPage, AFullDiskCostsTheCurvesAlone) {
  const auto run = finished("blocked");
  write_file_atomic(run.file("pictures"), "a file where a folder should be");
  EXPECT_NO_THROW(make_curves_sink(run, "blocked")->finish(summary()));
}

TEST_F(RunPage, AChangedConfigIsSaid) {
  const auto run = make("grown", {"optim.lr=1e-3"});
  record(run, 1, 10);
  run.finish(75);
  go_on(run);
  run.replace_config(yaml_of({"name=grown", "train.steps=60", "optim.lr=1e-3"}));
  const std::string page = page_of({run});
  EXPECT_TRUE(says(page, "Changed when the run was resumed:"));
  EXPECT_NE(page.find("<td>train.steps</td>\n<td>40</td>\n<td>60</td>"), std::string::npos) << page;
}

/// Its file was there when it began.
TEST_F(RunPage, TheScheduleOfARunIsItsOwnCopy) {
  const RunDirectory run = RunDirectory::create(
      root_.path(), "mine",
      {.command = "trireme train -n 2",
       .config_yaml = yaml_of({"parallel.pp=2", "pipeline.file=/gone/mine.csv", "train.global_batch=4"}),
       .device = "cpu",
       .mesh = "pp=2",
       .ranks = 2,
       .files = {{"schedule.csv", "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"}}});
  const RunLayout layout = layout_of(read_run(run.path()));
  EXPECT_EQ(layout.problem, "");
  const auto row = std::ranges::find(layout.rows, "pipeline", [](const auto& row) { return row.first; });
  ASSERT_NE(row, layout.rows.end());
  EXPECT_NE(row->second.find("2 stages, 2 micro-batches"), std::string::npos) << row->second;
}

TEST_F(RunPage, ComparesWhatDiffers) {
  const auto one = finished("ddp", {"parallel.policy=ddp"}), two = finished("fsdp", {"parallel.policy=fsdp"});
  const std::string page = page_of({one, two});
  EXPECT_TRUE(says(page, "2 runs"));
  EXPECT_TRUE(says(page, "All ended with the same weights, bit for bit."));
  EXPECT_NE(page.find("<td>parallel.policy</td>\n<td>ddp</td>\n<td>fsdp</td>"), std::string::npos);
  EXPECT_EQ(page.find("<td>optim.lr</td>"), std::string::npos) << "it is equal";
  EXPECT_TRUE(says(page, "20.0k (1.00x, 1.00x to 1.00x)"));
  EXPECT_TRUE(says(page, "ddp at step 12: "));
  EXPECT_TRUE(says(page, "fsdp at step 12: "));
  EXPECT_TRUE(says(page, "Validation loss over time"));
}

TEST_F(RunPage, ImagesAndTokensHaveNoRatio) {
  const auto text = finished("text"), images = finished("images", {"model.preset=lenet"});
  const std::string page = page_of({text, images});
  EXPECT_TRUE(says(page, "20.0k tokens/s"));
  EXPECT_TRUE(says(page, "20.0k images/s"));
  EXPECT_FALSE(says(page, "1.00x"));
}

TEST_F(RunPage, WhatFollowsFromOtherValuesIsFoldedAway) {
  const auto text = finished("text", {"model.preset=gpt-tiny"}),
             images = finished("images", {"model.preset=lenet"});
  const std::string page = page_of({text, images});
  const size_t begin = page.find("What differs"), fold = page.find("<details", begin);
  ASSERT_NE(fold, std::string::npos);
  const std::string shown = page.substr(begin, fold - begin);
  EXPECT_NE(shown.find("<td>model.preset</td>"), std::string::npos) << shown;
  EXPECT_EQ(shown.find("<td>model.image_size</td>"), std::string::npos) << shown;
}

TEST_F(RunPage, RunsOfOneNameAreToldApartByTheirFolders) {
  const auto one = finished("same"), two = finished("same");
  const std::vector<std::string> names = names_of({read_run(one.path()), read_run(two.path())});
  EXPECT_EQ(names[0], std::filesystem::path(one.path()).filename().string());
  EXPECT_NE(names[0], names[1]);
  EXPECT_TRUE(says(page_of({one, two}), "every value of the config"));
}

}  // namespace
}  // namespace trireme::report
