// `report` on run directories that were made without ranks.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/front_process.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

class Report : public ::testing::Test {
 protected:
  report::RunDirectory make_run(const std::string& name) {
    const auto run = report::RunDirectory::create(front_.file("runs"), name,
                                                  {.command = "trireme train",
                                                   .config_yaml = "name: " + name + "\n",
                                                   .device = "cpu",
                                                   .mesh = "dp_shard=2",
                                                   .ranks = 2});
    const auto sink = report::make_run_files_sink(run);
    for (int64_t number = 1; number <= 3; ++number) {
      StepRecord record;
      record.step = number;
      record.loss = 3.0;
      sink->record(record);
    }
    return run;
  }

  FrontProcess front_;
};

TEST_F(Report, PutsAPageIntoTheRunDirectoryAndSaysWhere) {
  const auto run = make_run("tiny");
  for (const char* word : {"tiny", "latest"}) {
    const Outcome outcome = front_.run({"report", word});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_TRUE(outcome.out.starts_with("report  runs/tiny-")) << outcome.out;
    EXPECT_TRUE(contains(outcome.out, "/report.html (")) << outcome.out;
    EXPECT_TRUE(read_file(run.file("report.html")).starts_with("<!DOCTYPE html>"));
    fs::remove(run.file("report.html"));
  }
}

TEST_F(Report, TakesARunThatIsNamedTwiceOnce) {
  make_run("tiny");
  const Outcome outcome = front_.run({"report", "runs/latest", "tiny", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["runs"].size(), 1u);
}

TEST_F(Report, ComparesSeveralAndPrintsTheirFigures) {
  make_run("one");
  make_run("two");
  const Outcome outcome = front_.run({"report", "one", "two", "-o", "both.html", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto json = outcome.json();
  EXPECT_EQ(json["schema"], "trireme.report/1");
  EXPECT_EQ(json["page"], "both.html");
  ASSERT_EQ(json["runs"].size(), 2u);
  EXPECT_EQ(json["runs"][1]["name"], "two");
  EXPECT_EQ(json["runs"][1]["loss"], 3.0);
  EXPECT_EQ(json["runs"][1]["state"], "no end recorded");
  EXPECT_TRUE(json["runs"][1]["val_loss"].is_null());
  EXPECT_EQ(json["bytes"], read_file(front_.file("both.html")).size());
}

TEST_F(Report, RefusesWhatIsNoRun) {
  make_run("tiny");
  fs::create_directories(front_.file("empty"));
  EXPECT_EQ(front_.run({"report"}).code, 2);
  const Outcome nowhere = front_.run({"report", "nowhere"});
  EXPECT_EQ(nowhere.code, 2);
  EXPECT_TRUE(contains(nowhere.err, "no run 'nowhere' was found")) << nowhere.err;
  const Outcome empty = front_.run({"report", "empty"});
  EXPECT_EQ(empty.code, 2);
  EXPECT_TRUE(contains(empty.err, "it has no manifest.json")) << empty.err;
  write_file_atomic(front_.file("empty/manifest.json"), "{");
  EXPECT_EQ(front_.run({"report", "empty"}).code, 7);
}

TEST_F(Report, SaysWhereAPageCannotBe) {
  make_run("tiny");
  const Outcome folder = front_.run({"report", "tiny", "-o", "."});
  EXPECT_EQ(folder.code, 2);
  EXPECT_TRUE(contains(folder.err, "is a folder; give a file")) << folder.err;
  const Outcome missing = front_.run({"report", "tiny", "-o", "a/b.html"});
  EXPECT_EQ(missing.code, 2);
  EXPECT_TRUE(contains(missing.err, "does not exist")) << missing.err;
  // Nobody may make a file there, root neither.
  EXPECT_EQ(front_.run({"report", "tiny", "-o", "/proc/report.html"}).code, 3);
}

}  // namespace
}  // namespace trireme::cli
