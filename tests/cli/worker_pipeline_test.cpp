// `bench pipeline` and the labs with their real worker.
#include <cstdint>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/cli/worker_fixture.h"

namespace trireme::cli {
namespace {

TEST_F(Worker, BenchPipelineMeasuresOneModelUnderEverySchedule) {
  const Words command = {
      "bench",           "pipeline", "-n",       "2",  "--device=cpu", "--precision.compute=fp32",
      "--micro-batches", "6",        "--chunks", "3",  "--steps",      "2",
      "--warmup",        "1",        "--seq",    "16", "--schedules"};
  const Outcome outcome = front_.run(
      command + Words{"gpipe,1f1b,interleaved_1f1b,zb_h1,interleaved_zb,zb_v,dualpipe_v", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = outcome.json()["rows"];
  ASSERT_EQ(rows.size(), 7u);
  for (const auto& row : rows) {
    EXPECT_EQ(row["samples_ms"].size(), 2u) << row;
    EXPECT_EQ(row["loss"], rows[0]["loss"]) << "one order of micro-batches, so the same bits: " << row;
    EXPECT_NEAR(row["grad_norm"].get<double>(), rows[0]["grad_norm"].get<double>(), 1e-6) << row;
    // A rank sends an fp32 (T, D) for each micro-batch and each boundary between it and the other rank.
    const bool v = row["schedule"] == "zb_v" || row["schedule"] == "dualpipe_v";
    const int64_t boundaries = v ? 2 : row["stages"].get<int64_t>() - 1;
    for (const auto& sent : row["sent_bytes"]) EXPECT_EQ(sent, 6 * boundaries * 16 * 64 * 4) << row;
  }
  EXPECT_EQ(rows[2]["stages"], 6);
  EXPECT_LT(rows[1]["step_bytes"][0], rows[0]["step_bytes"][0]) << "1f1b keeps fewer activations than gpipe";
  EXPECT_NEAR(rows[1]["simulated_bubble_share"].get<double>(), 1.0 / 7.0, 1e-12);

  const Outcome text = front_.run(command + Words{"dualpipe_v,interleaved_1f1b", "--layers", "2"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "\ndualpipe_v ")) << text.out;
  EXPECT_TRUE(contains(text.out, "\ninterleaved_1f1b was skipped: [plan.stages] there are 6 stages"))
      << text.out;
  EXPECT_EQ(front_.run(command + Words{"interleaved_1f1b", "--layers", "2"}).code, 2);
}

TEST_F(Worker, BenchPipelineSpreadsTheHead) {
  const Words command = {"bench",
                         "pipeline",
                         "-n",
                         "2",
                         "--device=cpu",
                         "--precision.compute=fp32",
                         "--json",
                         "--steps",
                         "1",
                         "--warmup",
                         "1",
                         "--seq",
                         "16",
                         "--schedules",
                         "1f1b,zb_v,dualpipe"};
  for (const char* tied : {"--model.tie_embeddings=false", "--model.tie_embeddings=true"}) {
    const auto rows = front_.run(command + Words{"--pipeline.spread_head=true", tied}).json()["rows"],
               plain = front_.run(command + Words{tied}).json()["rows"];
    ASSERT_EQ(rows.size(), 3u) << tied;
    for (size_t i = 0; i < 2; ++i) {
      const double loss = plain[i]["loss"].get<double>(), norm = plain[i]["grad_norm"].get<double>();
      EXPECT_NEAR(rows[i]["loss"].get<double>(), loss, 1e-6 * loss) << rows[i];
      EXPECT_NEAR(rows[i]["grad_norm"].get<double>(), norm, 4e-6 * norm) << rows[i];
      EXPECT_EQ(rows[i]["loss"], rows[0]["loss"]) << "one order of micro-batches, so the same bits";
      // Of the same unit, what a rank's stages take.
      const double without = plain[i]["simulated_makespan"].get<double>();
      EXPECT_GT(rows[i]["simulated_makespan"].get<double>(), without) << rows[i];
      EXPECT_LT(rows[i]["simulated_makespan"].get<double>(), 5.0 * without) << rows[i];
    }
    EXPECT_TRUE(contains(rows[2]["refused"].get<std::string>(), "a copy of each stage on two ranks"));
  }
}

TEST_F(Worker, BenchPipelineSaysWhatStepsDidBesideWhatIsSimulated) {
  const std::string folder = front_.file("pictures");
  const Outcome outcome =
      front_.run({"bench", "pipeline", "-n", "2", "--device=cpu", "--micro-batches", "4", "--steps", "2",
                  "--warmup", "1", "--schedules", "1f1b,zb_v", "--timeline", folder, "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = outcome.json()["rows"];
  for (const auto& row : rows) {
    const auto& report = row["report"];
    ASSERT_EQ(report["measured"]["ranks"].size(), 2u) << row;
    for (size_t rank = 0; rank < 2; ++rank) {
      const auto &measured = report["measured"]["ranks"][rank],
                 &simulated = report["simulated"]["ranks"][rank];
      double causes = 0.0;
      for (const auto& [name, seconds] : measured["idle_causes_s"].items()) causes += seconds.get<double>();
      EXPECT_NEAR(causes, measured["idle_s"].get<double>(), 1e-9) << row;
      EXPECT_EQ(measured["sent_bytes"], simulated["sent_bytes"]) << row;
      EXPECT_EQ(measured["sent_bytes"], row["sent_bytes"][rank]) << row;
      const double peak = measured["peak_activation_bytes"];
      EXPECT_GT(peak, 0.0);
      EXPECT_NEAR(simulated["peak_activation_bytes"].get<double>(), peak, 0.05 * peak) << row;
    }
    EXPECT_EQ(row["recorded_ms"].size(), 2u);
    const std::string name = row["schedule"];
    std::ifstream trace(folder + "/" + name + ".trace.json"), svg(folder + "/" + name + ".svg");
    EXPECT_GT(nlohmann::json::parse(trace)["traceEvents"].size(), 50u);
    EXPECT_NE(std::string(std::istreambuf_iterator<char>(svg), {}).find("simulated with the measured costs"),
              std::string::npos);
  }
}

TEST_F(Worker, BenchPipelineRunsStagesOfManyRanksOnOneForStudy) {
  front_.set("OMP_NUM_THREADS",
             "1");  // threads of one rank that wait for each other are slow on a busy machine
  const Words command = {"bench",   "pipeline", "--study",  "4", "--device=cpu", "--micro-batches", "8",
                         "--steps", "1",        "--warmup", "0", "--schedules"};
  const Outcome outcome = front_.run(command + Words{"1f1b,dualpipe", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto rows = outcome.json()["rows"];
  for (const auto& row : rows) {
    EXPECT_EQ(row["report"]["measured"]["ranks"].size(), 1u) << row;
    EXPECT_EQ(row["report"]["simulated"]["ranks"].size(), 4u) << row;
    EXPECT_NEAR(row["loss"].get<double>(), rows[0]["loss"].get<double>(), 1e-3) << row;
    EXPECT_EQ(row["sent_bytes"][0], 0) << row;
  }
  const Outcome text = front_.run(command + Words{"1f1b"});
  EXPECT_TRUE(text.out.starts_with("for study: the stages of 4 ranks run on one device")) << text.out;
  EXPECT_EQ(front_.run(command + Words{"1f1b", "-n", "2"}).code, 2);
}

TEST_F(Worker, BenchPipelineSplitsRanksBetweenPipelinesAndData) {
  const Words command = {
      "bench", "pipeline",    "--device=cpu", "--micro-batches",      "4", "--steps", "1", "--warmup",
      "0",     "--schedules", "1f1b",         "--parallel.dp_shard=2"};
  const Outcome outcome = front_.run(command + Words{"-n", "4", "--json", "--parallel.policy=zero3"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.json()["rows"][0]["stages"], 2);
  EXPECT_EQ(outcome.json()["tokens_per_step"], 2 * 4 * 32);
  const Outcome refused = front_.run(command + Words{"-n", "2"});
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(contains(refused.err, "a multiple of 2 that is at least 4")) << refused.err;
}

TEST_F(Worker, BenchPipelineThatRefusesAllShowsNoTable) {
  const Outcome outcome = front_.run(
      {"bench", "pipeline", "-n", "2", "--device=cpu", "--micro-batches", "2", "--schedules", "dualpipe"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(outcome.out.starts_with("dualpipe was skipped: ")) << outcome.out;
}

TEST_F(Worker, LabTrainsOneModelInBothModes) {
  const Words command = {
      "lab", "pipeline_1f1b", "--device=cpu", "--steps", "3", "--n-stages", "2", "--hidden-dim", "64"};
  const Outcome outcome = front_.run(command + Words{"--micro-batch-target", "8", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const auto modes = outcome.json()["modes"];
  ASSERT_EQ(modes.size(), 2u);
  EXPECT_EQ(modes[0]["mode"], "baseline");
  EXPECT_TRUE(modes[0]["blocking_sends"]);
  EXPECT_FALSE(modes[1]["blocking_sends"]);
  EXPECT_EQ(modes[1]["micro_batch_size"], 8);
  for (size_t step = 0; step < 3; ++step) {
    const double loss = modes[0]["losses"][step];
    EXPECT_NEAR(modes[1]["losses"][step].get<double>(), loss, 1e-5 * loss) << "the same model and batches";
  }
  const Outcome text = front_.run(command + Words{"--mode", "optimized", "--micro-batch-size", "16"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "[optimized] step 3/3 loss=")) << text.out;
  EXPECT_TRUE(contains(text.out, "stage 1 utilization")) << text.out;
  EXPECT_TRUE(contains(text.out, "stage 1 max queues, forward / backward")) << text.out;
  EXPECT_TRUE(contains(text.out, "4 of 16 rows")) << text.out;
  EXPECT_FALSE(contains(text.out, "baseline")) << text.out;
}

TEST_F(Worker, LabTakesTheNamesAndKnobsOfTheRequirements) {
  front_.set("OMP_NUM_THREADS", "1");
  const Outcome windows =
      front_.run({"lab", "labs/train_distributed:dualpipe_2stages", "--device=cpu", "--steps", "1",
                  "--dual-window", "8", "--batch-size", "32", "--micro-batch-size", "2", "--json"});
  ASSERT_EQ(windows.code, 0) << windows.err;
  const auto modes = windows.json()["modes"];
  for (const auto& mode : modes) {
    EXPECT_EQ(mode["window"], 8) << mode;
    EXPECT_EQ(mode["micro_batches"], 16) << mode;
  }
  const Outcome study = front_.run({"lab", "pipeline_dualpipev.py", "--device=cpu", "--steps", "1", "--study",
                                    "--n-stages", "3", "--mode", "optimized"});
  ASSERT_EQ(study.code, 0) << study.err;
  EXPECT_TRUE(contains(study.out, "for study: the stages of 3 ranks run on one device")) << study.out;
}

}  // namespace
}  // namespace trireme::cli
