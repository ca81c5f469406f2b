// Programs of workers that are processes behind a dispatcher.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <tuple>

#include "tests/controller/saved_run.h"
#include "tests/controller/served.h"
#include "tests/controller/some_text.h"
#include "tests/controller/trained_mini_gpt.h"
#include "tests/support/refusal.h"
#include "trireme/base/hash.h"

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
    const Outcome outcome = trained_model(config, {schedule});
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
  const Outcome outcome = trained_model(config, way);
  EXPECT_TRUE(outcome.end == ranks.end);
  EXPECT_EQ(outcome.losses, ranks.losses);
  EXPECT_GE(outcome.replays, 5);
}

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

/// The text that a program prints on stdout.
std::string output_of(const std::string& command) {
  std::string output;
  FILE* const pipe = ::popen(command.c_str(), "r");
  for (int next = 0; pipe != nullptr && (next = std::fgetc(pipe)) != EOF;)
    output.push_back(static_cast<char>(next));
  EXPECT_EQ(::pclose(pipe), 0) << command << "\n" << output;
  return output;
}

/// A file of a program has captured steps as they were made, and is the program that ranks have placed.
TEST(WorkerProcesses, ReplayTheFileOfAProgram) {
  const std::string file = ::testing::TempDir() + "program.txt";
  double sum = 0.0;
  uint64_t hash = 0;
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    gt::Options options;
    if (world->rank() == 0) options.program_file = file;
    const auto runner = std::make_shared<controller::RankProgram>(world);
    const gt::Workers workers(runner, options);
    gt::Tensor weight = gt::randn({8, 8});
    gt::Capture capture;
    for (int step = 0; step < 6; ++step) {
      capture([&] {
        const gt::no_grad off;
        weight.add_(gt::tanh(gt::matmul(weight, weight)));
      });
    }
    EXPECT_GT(capture.replays(), 1);
    const double last = weight.sum().item();
    if (world->rank() == 0) sum = last, hash = runner->placer().hash();
  });
  const std::string folder = ::testing::TempDir() + "replayed";
  const auto replayed = nlohmann::json::parse(
      output_of(TRIREME_PROGRAM " replay --device cpu --json --timeline " + folder + " " + file));
  EXPECT_EQ(replayed.at("workers"), 2);
  EXPECT_EQ(replayed.at("hash"), hex64(hash));
  ASSERT_EQ(replayed.at("fetched").size(), 1U);
  EXPECT_EQ(replayed.at("fetched").at(0).at("first").at(0).get<double>(), sum);
  double shares = 0.0;
  for (const auto& [kind, share] : replayed.at("shares").items()) shares += share.get<double>();
  EXPECT_GT(replayed.at("shares").at("operations"), 0.1);
  EXPECT_GT(shares, 0.5);
  EXPECT_LE(shares, 1.0 + 1e-9);
  const auto trace = nlohmann::json::parse(read_text(folder + "/trace.json")).at("traceEvents");
  const auto instructions = replayed.at("instructions").get<size_t>();
  EXPECT_EQ(trace.size(), 2 + 2 * instructions) << "both workers have a share of each instruction";
  EXPECT_TRUE(std::ranges::any_of(trace, [](const auto& one) {
    return one.at("name").template get<std::string>().find("= matmul") != std::string::npos;
  }));
  EXPECT_NE(read_text(folder + "/timeline.svg").find("worker 1"), std::string::npos);
  EXPECT_GE(replayed.at("most_bytes").at(1).get<int64_t>(), 2 * 8 * 8 * 4);
}

/// Workers that are processes read the batches of `trireme train`, whole or by rows, as they come and
/// captured; and so does a replay of the program's file, which names the text.
TEST(WorkerProcesses, ReadBatchesOfTextsThemselves) {
  ::setenv("XDG_CACHE_HOME", (text_folder() + "/cache").c_str(), 1);
  const gt::DatasetOptions dataset{.path = some_text("by processes.txt", 3000), .seq_len = 16, .batch = 6};
  const std::vector<Rows> expected = trained_batches(dataset, 8);
  const std::string signals = text_folder() + "/processes.yaml", file = text_folder() + "/program.txt";
  std::ofstream(signals) << "whole: {workers: [0, 1], replicated: true}\n"
                            "rows:\n  shard:\n    axis: 0\n    workers: [0, 1]\n";
  gt::Options options{.signals = signals, .device = "cpu", .program_file = file};
  options.command = TRIREME_PROGRAM;
  {
    const gt::Workers workers = gt::gpu_workers(2, options);
    const gt::Dataset text = gt::dataset(dataset);
    gt::Capture capture;
    for (size_t step = 0; step < expected.size(); ++step) {
      gt::Value inputs, targets;
      capture([&] {
        const auto batch = text.batch(static_cast<int64_t>(step));
        {
          const gt::signal::context scope("rows");
          inputs = batch.inputs.fetch();
        }
        const gt::signal::context scope("whole");
        targets = batch.targets.fetch();
      });
      EXPECT_EQ(inputs.integers(), expected[step].first);
      EXPECT_EQ(targets.integers(), expected[step].second);
    }
    EXPECT_GE(capture.replays(), 4);
  }
  const auto replayed =
      nlohmann::json::parse(output_of(TRIREME_PROGRAM " replay --device cpu --json " + file));
  ASSERT_EQ(replayed.at("fetched").size(), 2 * expected.size());
  for (size_t step = 0; step < expected.size(); ++step)
    EXPECT_EQ(replayed.at("fetched").at(2 * step).at("first").at(1), expected[step].first[1]);
}

/// Two workers in folders of their own, of which one has the text: the program learns who lacks it.
TEST(WorkerProcesses, NameTheWorkerThatLacksTheText) {
  ::setenv("XDG_CACHE_HOME", (text_folder() + "/cache").c_str(), 1);
  const std::string here = text_folder() + "/has-it", there = text_folder() + "/has-it-not";
  std::filesystem::create_directories(here);
  std::filesystem::create_directories(there);
  std::filesystem::copy_file(some_text("lacking.txt", 1000), here + "/words.txt",
                             std::filesystem::copy_options::overwrite_existing);
  const Environment environment = Environment::process();
  const std::string socket =
      controller::runtime_folder(environment) + "/test-" + std::to_string(::getpid()) + "-lacking";
  const launch::Child server({.program = TRIREME_PROGRAM,
                              .args = {"serve", "-q", "-n", "2", "--socket", socket, "--timeout", "30"},
                              .environment = environment});
  const auto worker_in = [&](const std::string& folder, const std::string& number) {
    return launch::ChildSpec{
        .program = "/bin/sh",
        .args = {"-c", "cd " + folder +
                           " && exec " TRIREME_PROGRAM " worker --device cpu --timeout 30 --number " +
                           number + " --socket " + socket},
        .environment = environment};
  };
  const double deadline = monotonic_seconds() + 30.0;
  while (!std::filesystem::exists(socket) && monotonic_seconds() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const launch::Child first(worker_in(here, "0")), second(worker_in(there, "1"));
  const gt::Workers workers = gt::connect(socket, {.timeout_s = 30});
  const gt::Dataset text = gt::dataset({.path = "/proc/self/cwd/words.txt", .seq_len = 8, .batch = 4});
  test::expect_mentions(test::failure_of([&] {
                          for (int64_t step = 0; step < 1000; ++step)
                            text.batch(step).inputs.fetch().integers();
                        }),
                        {"worker 1", "batch dataset=1", "#",
                         "dataset '/proc/self/cwd/words.txt' of worker_processes_test.cpp:", "No such file",
                         "set data.path to"});
}

/// JSON has no NaN; numbers of workers may have gaps.
TEST(WorkerProcesses, ReplayValuesThatAreNoNumbersOnWorkersWithAGap) {
  const std::string file = ::testing::TempDir() + "nan.txt";
  std::ofstream(file) << "trireme.program/1\nsignal a workers=3,999999\nt0 = full shape=2 value=-1 @a\n"
                         "t1 = log t0 @a\nfetch t1 to=1\n";
  const auto replayed =
      nlohmann::json::parse(output_of(TRIREME_PROGRAM " replay --device cpu --json " + file));
  EXPECT_EQ(replayed.at("workers"), 2);
  EXPECT_EQ(replayed.at("fetched").at(0).at("first").at(0), "nan");
  EXPECT_NE(output_of(TRIREME_PROGRAM " replay --device cpu " + file).find("fetch 1   nan nan"),
            std::string::npos);
}

TEST(WorkerProcesses, TakeFromVariablesWhatOptionsDoNotSay) {
  const Environment environment({{"TRIREME_COMMAND", "/there/trireme"},
                                 {"TRIREME_PROGRAM_FILE", "program.txt"},
                                 {"TRIREME_CONFIG", "other.yaml"},
                                 {"TRIREME_AUTO_SHARD", "1"},
                                 {"TRIREME_BACKEND", "numpy"}});
  const gt::Options options = gt::Options{.signals = "mine.yaml"}.completed(environment);
  EXPECT_EQ(options.signals, "mine.yaml");
  EXPECT_EQ(options.command, "/there/trireme");
  EXPECT_EQ(options.program_file, "program.txt");
  EXPECT_EQ(options.device, "cpu");
  EXPECT_TRUE(options.auto_shard);
  EXPECT_EQ((gt::Options{.device = "cuda"}.completed(environment).device), "cuda");
}

/// A failure in a step that is made again names its instruction, and ends the session.
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
  test::expect_mentions(test::failure_of([&] { look_up(9); }),
                        {"worker 0", "embedding", "of a step that was captured"});
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
