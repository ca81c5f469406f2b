// Images through the command and its real worker: drawn, described and trained on.
#include <fmt/format.h>

#include <cmath>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"

namespace trireme::cli {
namespace {

TEST_F(Worker, DrawsDigitsAndSaysWhatAFolderHolds) {
  const Words make = {"data", "make",   "digits", "--format", "mnist",  "--train",
                      "100",  "--test", "20",     "--out",    "digits", "--json"};
  const Outcome made = front_.run(make);
  if (made.code == 3) GTEST_SKIP() << made.err;  // no fonts here, or a build without FreeType
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_FALSE(made.json()["was_there"].get<bool>());
  for (const char* none : {"--train=0", "--train=-5", "--test=0"})
    EXPECT_EQ(front_.run({"data", "make", "digits", none, "--out", "none"}).code, 2) << none;
  const Outcome again = front_.run(make);
  EXPECT_TRUE(again.json()["was_there"].get<bool>()) << again.err;
  EXPECT_EQ(again.json()["digest"], made.json()["digest"]);
  const Outcome info = front_.run({"data", "info", "digits", "--json"});
  ASSERT_EQ(info.code, 0) << info.err;
  EXPECT_EQ(info.json()["format"], "idx");
  EXPECT_EQ(info.json()["train"]["shape"], (std::vector<int>{1, 28, 28}));
  EXPECT_EQ(info.json()["train"]["by_class"], std::vector<int>(10, 10));
  EXPECT_EQ(info.json()["val"]["by_class"], std::vector<int>(10, 2));
  const Outcome table = front_.run({"data", "info", "digits", "--sheet", "sheet.png"});
  EXPECT_TRUE(contains(table.out, "idx, 10 classes")) << table.out << table.err;
  EXPECT_TRUE(read_file(front_.file("sheet.png")).starts_with("\x89PNG"));
}

TEST_F(Worker, TrainsOnDigitsByEpochs) {
  const Outcome made = front_.run(
      {"data", "make", "digits", "--format", "mnist", "--train", "100", "--test", "20", "--out", "digits"});
  if (made.code == 3) GTEST_SKIP() << made.err;  // no fonts here, or a build without FreeType
  const Words train = {"train",
                       "-n",
                       "2",
                       "--model.preset=lenet",
                       "--data.path=digits",
                       "--train.epochs=2",
                       "--train.global_batch=32"};
  const Outcome plan = front_.run(train + Words{"--dry-run"});
  EXPECT_TRUE(contains(plan.out, "32 per step, 2 epochs")) << plan.out << plan.err;
  const Outcome run = front_.run(train + Words{"--json"});
  ASSERT_EQ(run.code, 0) << run.err;
  std::vector<nlohmann::json> steps;
  for (const std::string& line : split(run.out, '\n')) {
    if (line.starts_with("{\"step\"")) steps.push_back(nlohmann::json::parse(line));
  }
  ASSERT_EQ(steps.size(), 8u) << "two epochs of 32, 32, 32 and 4 images";
  EXPECT_EQ(steps.back()["tokens"], 200);
  for (const auto& step : steps)
    EXPECT_EQ(step.contains("val_top1"), step["step"].get<int>() % 4 == 0) << step;
  const Outcome text = front_.run(train);
  EXPECT_TRUE(contains(text.out, "img/s")) << text.out;
  EXPECT_TRUE(contains(text.err, "drawn digits (idx files) in ")) << text.err;
  EXPECT_TRUE(contains(text.err, "100 + 20 images of 10 classes")) << text.err;
  EXPECT_TRUE(contains(text.err, "pictures of the confusion matrix and the worst mistakes in runs/"))
      << text.err;
  const auto validation = nlohmann::json::parse(read_file(front_.file("runs/latest/validation.json")));
  EXPECT_EQ(validation["images"], 20);
  EXPECT_EQ(validation["right"], std::llround(20.0 * steps.back()["val_top1"].get<double>()))
      << "of an equal run";
  EXPECT_EQ(validation["mistakes"].size(), 20U - validation["right"].get<size_t>());
  ASSERT_EQ(front_.run({"report", "latest"}).code, 0);
  const std::string page = read_file(front_.file("runs/latest/report.html"));
  for (const char* name : {"confusion", "mistakes"}) {
    const std::string picture = read_file(front_.file(fmt::format("runs/latest/pictures/{}.svg", name)));
    EXPECT_TRUE(contains(page, picture)) << name << " is no part of the page";
  }
  EXPECT_TRUE(contains(read_file(front_.file("runs/latest/pictures/curves.svg")), "Validation accuracy"));
}

TEST_F(Worker, RefusesFoldersWithoutImages) {
  const Outcome outcome = front_.run({"data", "info", "."});
  EXPECT_EQ(outcome.code, 2) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "has no JPEG or PNG file")) << outcome.err;
}

}  // namespace
}  // namespace trireme::cli
