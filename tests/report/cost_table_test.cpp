#include "trireme/report/cost_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "tests/report/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/report/run_dir.h"
#include "trireme/report/step_times.h"

namespace trireme::report {
namespace {

constexpr int64_t kMiB = 1 << 20;

/// Columns are two or more blanks apart.
std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  for (const std::string& part : split(line, ' ')) {
    const bool goes_on = !cells.empty() && !cells.back().empty() && !part.empty();
    if (goes_on) {
      cells.back() += " " + part;
    } else if (!part.empty() || (!cells.empty() && !cells.back().empty())) {
      cells.push_back(part);
    }
    if (cells.size() > 1 && !part.empty() && cells[cells.size() - 2].empty()) cells.erase(cells.end() - 2);
  }
  return cells;
}

/// What the first row says in the column `title`.
std::string cell(const std::string& table, const std::string& title) {
  const std::vector<std::string> lines = split(table, '\n');
  const std::vector<std::string> titles = cells_of(lines.at(0));
  const auto column = std::ranges::find(titles, title) - titles.begin();
  return cells_of(lines.at(1)).at(static_cast<size_t>(column));
}

RunCost cost_of(int64_t parameters, int64_t gradients, int64_t optimizer) {
  RunCost cost;
  cost.predicted = cost.measured = {parameters * kMiB, gradients * kMiB, optimizer * kMiB};
  cost.predicted_wire_bytes = 7 * kMiB;
  cost.measured_wire_bytes = 5 * kMiB;
  return cost;
}

TEST(CostTable, ComparesWithDdpAndMarksWhatWasNotMeasured) {
  const std::string text = cost_table(
      {{"ddp", cost_of(10, 10, 20), false, {}, 0}, {"zero1", cost_of(10, 10, 10), true, 12.34, 99 * kMiB}});
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
  EXPECT_EQ(cell(cost_table({{"ddp", cost, false, {}, 0}}), "activations"), "-");
  cost.measured_activation_bytes = 43 * kMiB;
  const std::string measured = cost_table({{"ddp", cost, true, 1.0, 0}});
  EXPECT_EQ(cell(measured, "activations"), "43.0 MiB");
  EXPECT_EQ(cell(measured, "predicted activations"), "41.0 MiB");
}

TEST(CostTable, ShowsWhatThePeakIsMadeOf) {
  RunCost cost = cost_of(1, 1, 1);
  cost.predicted_gathered_bytes = 11 * kMiB;
  cost.baseline_bytes = 12 * kMiB;
  cost.predicted_peak_bytes = 13 * kMiB;
  const std::string text = cost_table({{"ddp", cost, true, 1.0, 14 * kMiB}});
  EXPECT_EQ(cell(text, "predicted gathered"), "11.0 MiB");
  EXPECT_EQ(cell(text, "baseline"), "12.0 MiB");
  EXPECT_EQ(cell(text, "predicted peak"), "13.0 MiB");
  EXPECT_EQ(cell(text, "peak"), "14.0 MiB");
  EXPECT_EQ(cell(cost_table({{"ddp", cost, false, {}, 0}}), "baseline"), "-");
}

TEST(CostTable, NamesEveryColumnOnce) {
  const std::string text = cost_table({{"ddp", cost_of(1, 1, 1), true, 1.0, 0}});
  std::set<std::string> titles;
  for (const std::string& title : cells_of(split(text, '\n').front()))
    EXPECT_TRUE(titles.insert(title).second);
}

TEST(CostTable, CannotTellTheTimeOfAStepFromFew) {
  const std::string few = cost_table({{"ddp", cost_of(1, 1, 1), true, {}, 0}});
  EXPECT_EQ(cell(few, "step ms"), "-");
  EXPECT_NE(few.find("\nstep ms: needs runs of at least 5 steps"), std::string::npos) << few;
  const std::string enough = cost_table({{"ddp", cost_of(1, 1, 1), true, 1.5, 0}});
  EXPECT_EQ(cell(enough, "step ms"), "1.5");
  EXPECT_EQ(enough.find("needs runs"), std::string::npos);
}

TEST(StepTimes, LeaveOutTheWarmUpAndNeedFiveSteps) {
  const TemporaryFolder folder;
  const auto steady = [&](const std::vector<double>& steps) {
    std::string lines;
    for (const double ms : steps) lines += fmt::format("{{\"step_ms\": {}}}\n", ms);
    write_file_atomic(folder.file("metrics.jsonl"), lines);
    return steady_step_ms(folder.path());
  };
  EXPECT_TRUE(steady({4200, 1300, 1300, 1300}).empty()) << "four steps cannot tell";
  EXPECT_EQ(steady({4200, 1400, 1300, 1301, 1302}), (std::vector<double>{1300, 1301, 1302}));
  EXPECT_EQ(steady(std::vector<double>(20, 1.0)).size(), 15u) << "a quarter is warm-up";
  write_file_atomic(folder.file("metrics.jsonl"), "{}\n");
  EXPECT_THROW(steady_step_ms(folder.path()), DataError);
}

// The bounds for 5, 10 and 20 values at 95% are order statistics 1 and 5, 2 and 9, 6 and 15 (Conover, table
// A3); ours never lie inside of them.
TEST(StepTimes, TheIntervalOfTheMedianIsMadeOfOrderStatistics) {
  const auto interval = [](int count) {
    std::vector<double> values;
    for (int i = count; i >= 1; --i) values.push_back(i);
    return *median_interval(values);
  };
  for (const auto& [count, low, high] : {std::tuple(5, 1, 5), std::tuple(10, 2, 9), std::tuple(20, 6, 15)}) {
    EXPECT_LE(interval(count).low, low) << count;
    EXPECT_GE(interval(count).high, high) << count;
    EXPECT_GE(interval(count).low, low - 1) << count;
    EXPECT_LE(interval(count).high, high + 1) << count;
  }
  EXPECT_FALSE(median_interval({}));
  EXPECT_FALSE(median({}));
  EXPECT_EQ(median({3.0, 1.0, 2.0}), 2.0);
  EXPECT_EQ(median({4.0, 1.0, 2.0, 3.0}), 2.5);
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

/// Of hooks for which no formula tells what they send.
TEST(CostTable, HasNoNumberWhereBytesAreNotPredicted) {
  const TemporaryFolder folder;
  const auto run = RunDirectory::create(
      folder.path(), "tiny", {.command = "", .config_yaml = "", .device = "cpu", .mesh = "", .ranks = 2});
  RunSummary summary;
  summary.cost = cost_of(1, 2, 3);
  summary.cost.predicted_wire_bytes.reset();
  make_run_files_sink(run)->finish(summary);
  const CostRow row = read_cost(run.path(), "ddp");
  EXPECT_FALSE(row.cost.predicted_wire_bytes.has_value());
  EXPECT_EQ(cell(cost_table({row}), "predicted sent/step"), "-");
  EXPECT_EQ(cell(cost_table({row}), "sent/step"), "5.00 MiB");
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
