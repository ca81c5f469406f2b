#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

StepRecord step(int64_t number) {
  StepRecord record;
  record.step = number;
  record.loss = 1.0 / static_cast<double>(number);
  return record;
}

TEST(RunFiles, MetricsHoldOneObjectAStepInOrder) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto sink = make_run_files_sink(run);
  for (int64_t i = 1; i <= 5; ++i) sink->record(step(i));

  const auto lines =
      split(read_file(run.file("metrics.jsonl")), '\n');  // before finish: nothing is held back
  ASSERT_EQ(lines.size(), 6u);
  EXPECT_TRUE(lines.back().empty());
  for (int64_t i = 1; i <= 5; ++i) {
    const auto json = nlohmann::json::parse(lines[static_cast<size_t>(i - 1)]);
    EXPECT_EQ(json["step"], i);
    EXPECT_EQ(json["loss"].get<double>(), 1.0 / static_cast<double>(i));
  }
}

TEST(RunFiles, StepsThatAreMadeAgainAreThereOnce) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  {
    const auto sink = make_run_files_sink(run);
    for (int64_t i = 1; i <= 7; ++i) sink->record(step(i));
  }
  LineFile(run.file("metrics.jsonl")).append("{\"step\": 8, \"los");  // its process was killed
  const auto sink = make_run_files_sink(run);
  sink->resume(4);
  for (int64_t i = 5; i <= 9; ++i) sink->record(step(i));
  const auto lines = split(read_file(run.file("metrics.jsonl")), '\n');
  ASSERT_EQ(lines.size(), 10u);
  for (int64_t i = 1; i <= 9; ++i)
    EXPECT_EQ(nlohmann::json::parse(lines[static_cast<size_t>(i - 1)])["step"], i);
}

/// What an editor or another program has put among the lines costs none of the good ones.
TEST(RunFiles, ALineThatIsNoStepIsLeftOutAlone) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  for (const char* line :
       {"", "text", "[1,2]", "\xff\xfe", "{}", R"({"step":null})", R"({"step":"3"})", R"({"step":[3]})",
        R"({"step":true})", R"({"step":3.7})", R"({"step":1e300})", R"({"step":-5})", R"({"step":0})",
        R"({"step":18446744073709551615})", R"({"step":2})"}) {
    std::string good;
    for (int64_t i = 1; i <= 6; ++i) {
      good += to_json_line(step(i)) + "\n";
      if (i == 2) good += std::string(line) + "\n";
    }
    write_file_atomic(run.file("metrics.jsonl"), good);
    EXPECT_EQ(run.last_step(), 6) << line;
    const auto sink = make_run_files_sink(run);
    ::testing::internal::CaptureStderr();
    EXPECT_TRUE(sink->resume(5)) << line;
    const std::string told = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(told.find("line 3 of " + run.file("metrics.jsonl")), std::string::npos) << line << told;
    sink->record(step(6));
    const auto lines = split(read_file(run.file("metrics.jsonl")), '\n');
    ASSERT_EQ(lines.size(), 7u) << line;
    for (int64_t i = 1; i <= 6; ++i)
      EXPECT_EQ(lines[static_cast<size_t>(i - 1)], to_json_line(step(i))) << line;
  }
  write_file_atomic(run.file("metrics.jsonl"), "{\"step\":2}\n{\"step\":-5}\n");
  EXPECT_EQ(run.last_step(), 2) << "the last that is a step";
}

TEST(RunFiles, TheRunChangesWhenItGoesOn) {
  const TemporaryFolder root;
  Manifest manifest;
  manifest.config_yaml = "name: a\n";
  const auto run = RunDirectory::create(root.path(), "run", manifest);
  write_file_atomic(run.file("summary.json"), "{}");
  run.finish(0);
  const std::string before = read_file(run.file("manifest.json"));
  manifest.config_yaml = "name: b\n";
  const auto sink = make_run_files_sink(run, {.attempt = 2, .manifest = manifest});
  EXPECT_EQ(read_file(run.file("config.yaml")), "name: a\n") << "its checkpoint may refuse the other one";
  EXPECT_EQ(read_file(run.file("manifest.json")), before);
  EXPECT_TRUE(std::filesystem::exists(run.file("summary.json")));
  sink->resume(4);
  EXPECT_EQ(read_file(run.file("config.yaml")), "name: b\n");
  EXPECT_EQ(read_file(run.file("config.attempt-1.yaml")), "name: a\n");
  EXPECT_FALSE(std::filesystem::exists(run.file("summary.json")));
  ASSERT_EQ(run.attempts().size(), 2u);
  EXPECT_EQ(run.attempts()[1].resumed_from, 4);
}

TEST(RunFiles, SummaryAppearsAtTheEndOnly) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto sink = make_run_files_sink(run);
  sink->record(step(1));
  EXPECT_FALSE(std::filesystem::exists(run.file("summary.json")));
  RunSummary summary;
  summary.steps = 1;
  summary.weights_digest = "0123456789abcdef";
  sink->finish(summary);
  const auto json = read_json(run.file("summary.json"));
  EXPECT_EQ(json["steps"], 1);
  EXPECT_EQ(json["weights_digest"], "0123456789abcdef");
}

/// Runs `action` in a child whose files may not grow beyond `bytes`, as on a full disk. Returns its exit
/// code: 0 when nothing was thrown, 3 for an EnvironmentError that names `path`, 1 otherwise.
template <typename Action>
int with_full_disk(rlim_t bytes, const std::string& path, Action action) {
  const pid_t child = fork();
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{bytes, bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int code = 0;
    try {
      action();
    } catch (const EnvironmentError& error) {
      code = std::string(error.what()).find(path) != std::string::npos ? 3 : 1;
    } catch (...) {
      code = 1;
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void record_many(Sink& sink) {
  for (int64_t i = 1; i <= 1000; ++i) sink.record(step(i));
}

TEST(RunFiles, AFullDiskIsAnErrorThatNamesTheFile) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto act = [&] { record_many(*make_run_files_sink(run)); };
  EXPECT_EQ(with_full_disk(RLIM_INFINITY, run.file("metrics.jsonl"), act), 0);
  EXPECT_EQ(with_full_disk(4096, run.file("metrics.jsonl"), act), 3);
}

TEST(RunFiles, AFullDiskLeavesNoHalfLines) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto act = [&] {
    const auto sink = make_run_files_sink(run);
    for (int64_t i = 1; i <= 100; ++i) {
      try {
        sink->record(step(i));
      } catch (const EnvironmentError&) {
      }
    }
  };
  EXPECT_EQ(with_full_disk(4000, run.file("metrics.jsonl"), act), 0);
  auto lines = split(read_file(run.file("metrics.jsonl")), '\n');
  EXPECT_EQ(lines.back(), "");
  lines.pop_back();
  EXPECT_GT(lines.size(), 5u);
  for (size_t i = 0; i < lines.size(); ++i) {
    EXPECT_EQ(nlohmann::json::parse(lines[i])["step"], static_cast<int64_t>(i + 1));
  }
}

TEST(RunFiles, AFullDiskLeavesNoHalfSummary) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  RunSummary summary;
  summary.sample = std::string(10000, 'x');
  EXPECT_EQ(
      with_full_disk(4096, run.file("summary.json"), [&] { make_run_files_sink(run)->finish(summary); }), 3);
  EXPECT_FALSE(std::filesystem::exists(run.file("summary.json")));
}

TEST(Tensorboard, AFullDiskIsAnErrorThatNamesTheFile) {
  const TemporaryFolder root;
  const auto run = RunDirectory::create(root.path(), "run", {});
  const auto act = [&] { record_many(*make_tensorboard_sink(run)); };
  EXPECT_EQ(with_full_disk(4096, run.file("tensorboard/events.out.tfevents."), act), 3);
}

}  // namespace
}  // namespace trireme::report
