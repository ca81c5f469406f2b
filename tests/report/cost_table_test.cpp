#include "trireme/report/cost_table.h"

#include <gtest/gtest.h>

#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/report/run_dir.h"

namespace trireme::report {
namespace {

constexpr int64_t kMiB = 1 << 20;

RunCost cost_of(int64_t parameters, int64_t gradients, int64_t optimizer) {
  RunCost cost;
  cost.predicted = cost.measured = {parameters * kMiB, gradients * kMiB, optimizer * kMiB};
  cost.predicted_wire_bytes = 7 * kMiB;
  cost.measured_wire_bytes = 5 * kMiB;
  return cost;
}

TEST(CostTable, ComparesWithDdpAndMarksWhatWasNotMeasured) {
  const std::string text = cost_table(
      {{"ddp", cost_of(10, 10, 20), false, 0.0, 0}, {"zero1", cost_of(10, 10, 10), true, 12.34, 99 * kMiB}});
  EXPECT_NE(text.find("25.0%"), std::string::npos) << text;
  EXPECT_NE(text.find("12.3"), std::string::npos) << text;
  EXPECT_NE(text.find("5.00 MiB"), std::string::npos) << "sent by zero1\n" << text;
  const size_t ddp = text.find("\nddp");
  const std::string row = text.substr(ddp, text.find('\n', ddp + 1) - ddp);
  EXPECT_EQ(row.find("5.00 MiB"), std::string::npos) << row;
  EXPECT_NE(row.find("7.00 MiB"), std::string::npos) << row;
}

TEST(CostTable, ShowsActivationsBesideTheirPrediction) {
  RunCost cost = cost_of(1, 1, 1);
  cost.predicted_activation_bytes = 41 * kMiB;
  EXPECT_NE(cost_table({{"ddp", cost, false, 0.0, 0}}).find("-   41.0 MiB"), std::string::npos);
  cost.measured_activation_bytes = 43 * kMiB;
  EXPECT_NE(cost_table({{"ddp", cost, true, 1.0, 0}}).find("43.0 MiB   41.0 MiB"), std::string::npos);
}

TEST(CostTable, ReadsBackWhatARunHasWritten) {
  const TemporaryFolder folder;
  const auto run = RunDirectory::create(
      folder.path(), "tiny", {.command = "", .config_yaml = "", .device = "cpu", .mesh = "", .ranks = 2});
  RunSummary summary;
  summary.cost = cost_of(1, 2, 3);
  summary.cost.predicted_activation_bytes = 8 * kMiB;
  summary.cost.measured_activation_bytes = 9 * kMiB;
  summary.peak_bytes = 77;
  const auto sink = make_run_files_sink(run);
  for (int64_t step = 1; step <= 9; ++step) {
    StepRecord record;
    record.step = step;
    record.step_ms = step <= 2 ? 1000.0 : 10.0 * static_cast<double>(step);
    sink->record(record);
  }
  sink->finish(summary);
  const CostRow row = read_cost(run.path(), "zero2");
  EXPECT_EQ(row.policy, "zero2");
  EXPECT_TRUE(row.measured);
  EXPECT_EQ(row.cost.measured.optimizer, 3 * kMiB);
  EXPECT_EQ(row.cost.measured_wire_bytes, 5 * kMiB);
  EXPECT_EQ(row.cost.predicted_activation_bytes, 8 * kMiB);
  EXPECT_EQ(row.cost.measured_activation_bytes, 9 * kMiB);
  EXPECT_EQ(row.peak_bytes, 77);
  EXPECT_EQ(row.step_ms, 60.0) << "the median of steps 3 to 9";
}

TEST(CostTable, ARunWithoutItsSummaryIsNamed) {
  const TemporaryFolder folder;
  const auto run = RunDirectory::create(
      folder.path(), "tiny", {.command = "", .config_yaml = "", .device = "cpu", .mesh = "", .ranks = 2});
  EXPECT_THROW(read_cost(run.path(), "ddp"), Error);
  write_file_atomic(run.file("summary.json"), "{}");
  EXPECT_THROW(read_cost(run.path(), "ddp"), DataError);
}

}  // namespace
}  // namespace trireme::report
