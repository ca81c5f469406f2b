// Programs of workers that are processes behind a dispatcher.
#include <gtest/gtest.h>

#include <csignal>
#include <fstream>
#include <iterator>
#include <tuple>

#include "tests/controller/saved_run.h"
#include "tests/controller/served.h"
#include "tests/controller/trained_mini_gpt.h"
#include "tests/support/refusal.h"

namespace trireme {
namespace {

/// Processes behind a dispatcher compute the bits that ranks do which make the same program.
TEST(WorkerProcesses, AreTheRanks) {
  for (const auto& [tp, stages, schedule] :
       {std::tuple<int64_t, int64_t, const char*>{2, 2, "1f1b"}, {1, 4, "zb_v"}}) {
    const bool there_and_back = std::string(schedule) == "zb_v";
    const mini_gpt::Config config = with_stages(stages);
    const Outcome ranks = run_mesh(config, tp, {schedule}, there_and_back);
    const int64_t count = tp * stages / (there_and_back ? 2 : 1);
    gt::Options options{.signals = signals_file(config, tp, count), .device = "cpu"};
    options.command = TRIREME_PROGRAM;
    options.instruction_log = ::testing::TempDir() + "instructions.log";
    const gt::Workers workers = gt::gpu_workers(count, options);
    const Outcome outcome = train(config, {schedule});
    EXPECT_EQ(outcome.begin, ranks.begin);
    EXPECT_EQ(outcome.end, ranks.end);
    EXPECT_EQ(outcome.losses, ranks.losses);
    std::ifstream file(options.instruction_log);
    const std::string log(std::istreambuf_iterator<char>(file), {});
    for (const char* part : {"model.h:", "matmul", tp > 1 ? "sharded along" : "replicated",
                             "stage0_to_stage1", "stage1_to_stage0", "adamw_"})
      EXPECT_TRUE(log.find(part) != std::string::npos) << part;
  }
}

TEST(WorkerProcesses, MakeCapturedStepsAgain) {
  const mini_gpt::Config config = with_stages(2);
  Way way{.schedule = "1f1b", .steps = 12};
  const Outcome ranks = run_mesh(config, 2, way);
  gt::Options options{.signals = signals_file(config, 2, 4), .device = "cpu"};
  options.command = TRIREME_PROGRAM;
  const gt::Workers workers = gt::gpu_workers(4, options);
  way.captured = true;
  const Outcome outcome = train(config, way);
  EXPECT_TRUE(outcome.end == ranks.end);
  EXPECT_EQ(outcome.losses, ranks.losses);
  EXPECT_GE(outcome.replays, 5);
}

/// What fails in a step that is made again names its instruction, and ends the session.
TEST(WorkerProcesses, NameTheInstructionThatFailsInACapturedStep) {
  const Served served(1);
  const gt::Workers workers(served.program(), {});
  gt::Tensor table = gt::ones({4, 2});
  gt::Capture capture;
  const auto look_up = [&](int64_t word) {
    gt::Value value;
    capture([&] {
      value = gt::nn::functional::embedding(gt::tensor(std::vector<int64_t>{word}, {1}), table).fetch();
    });
    return value.floats()[0];
  };
  for (int i = 0; i < 5; ++i) EXPECT_EQ(look_up(3), 1.0F);
  EXPECT_GT(capture.replays(), 0);
  test::expect_mentions(test::failure_of([&] { look_up(9); }), {"worker 0", "embedding"});
}

/// A worker dies; new ones go on where the last file was written.
TEST(WorkerProcesses, GoOnAfterALostWorker) {
  const SavedMesh mesh{.tp = 2, .stages = 1};
  const std::string file = saved_path("lost"), signals = signals_file(with_stages(1), 2, 2);
  const SavedOutcome straight = train_until(3, mesh, true);
  {
    const Served served(2);
    const gt::Workers workers(served.program(), {.signals = signals});
    SavedRun run(with_stages(1), true, 5);
    for (int64_t step = 0; step < 2; ++step) {
      run.step(step);
      run.save(file, step + 1);
    }
    ::kill(served.pid_of(1), SIGKILL);
    test::expect_mentions(test::failure_of([&] {
                            for (int64_t step = 2; step < 1000; ++step) {
                              run.step(step);
                              run.save(file + ".late", step + 1);
                            }
                          }),
                          {"worker 1"});
  }
  const Served served(2);
  const gt::Workers workers(served.program(), {.signals = signals});
  SavedRun run(with_stages(1), true, 6);
  EXPECT_EQ(run.load(file), 2);
  run.step(2);
  EXPECT_EQ(values_of(run.named()), straight.values);
  EXPECT_EQ(run.losses, std::vector<double>{straight.losses.back()});
}

}  // namespace
}  // namespace trireme
