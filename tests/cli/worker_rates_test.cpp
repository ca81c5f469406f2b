// The rates of this machine, and how near the steps that they predict are to those that run.
#include <algorithm>
#include <cstdio>
#include <filesystem>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"
#include "trireme/plan/rates.h"

namespace trireme::cli {
namespace {

double median_of(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

/// Other programs on the machine make a step several times longer.
constexpr double kBusyMachine = 4.0;

TEST_F(Worker, ProbeMeasuresRatesThatPredictSteps) {
  const Outcome probe = front_.run({"doctor", "--probe", "rates.json", "-n", "2", "--cpu"});
  ASSERT_EQ(probe.code, 0) << probe.err;
  const plan::Rates rates = plan::rates_from_text(read_file(front_.file("rates.json")), "rates.json");
  EXPECT_TRUE(rates.measured && rates.links.measured && !rates.on_gpu);
  EXPECT_EQ(rates.ranks, 2);
  EXPECT_GT(rates.disk.write, 0.0);
  EXPECT_FALSE(std::filesystem::exists(front_.file("rates.json.disk")));
  EXPECT_GT(rates.products.at("fp32")[0].most_flops(), 1e8);
  EXPECT_GT(rates.memory.at("fp32").cached, 1e8);

  const Words common = {"-n",
                        "2",
                        "--device=cpu",
                        "--model.preset=gpt-tiny",
                        "--data.path=text.txt",
                        "--data.seq_len=128",
                        "--train.global_batch=16",
                        "--train.val_batches=0"};
  for (const Words& way :
       {Words{"--parallel.policy=fsdp"}, Words{"--parallel.policy=ddp", "--train.micro_batch=4"},
        Words{"--parallel.pp=2", "--pipeline.micro_batches=8"}}) {
    const auto planned =
        front_.run(Words{"plan", "time", "--probe", "rates.json", "--json"} + common + way).json();
    const Outcome trained =
        front_.run(Words{"train", "--train.steps=16", "--train.log_every=1"} + common + way);
    ASSERT_EQ(trained.code, 0) << trained.err;
    std::vector<double> speeds;
    for (const auto& step : steps()) {
      if (step.contains("tokens_per_s") && step["step"] > 4) speeds.push_back(step["tokens_per_s"]);
    }
    ASSERT_GE(speeds.size(), 8u) << way.front();
    const double ratio = planned["tokens_per_s"].get<double>() / median_of(speeds);
    std::printf("%s: predicted over measured tokens/s %.2f\n", way.front().c_str(), ratio);
    EXPECT_LT(ratio, kBusyMachine) << way.front();
    EXPECT_GT(ratio, 1.0 / kBusyMachine) << way.front();
  }
}

/// The terms of plan/memory.h on a CPU: libraries, state, what is kept for backward. With
/// memory.recompute=block gradients within a block are not counted.
TEST_F(Worker, PeaksAreWithinATenthOfThosePredicted) {
  const Words common = {"train",
                        "--device=cpu",
                        "--train.steps=4",
                        "--train.val_batches=0",
                        "--data.path=text.txt",
                        "--data.seq_len=128"};
  const Words cases[] = {
      {"-n", "1", "--model.preset=gpt-tiny", "--train.global_batch=16"},
      {"-n", "1", "--model.preset=gpt-tiny", "--train.global_batch=64"},
      {"-n", "2", "--model.preset=llama-tiny", "--train.global_batch=32"},
      {"-n", "2", "--model.preset=gpt-tiny", "--train.global_batch=32", "--parallel.policy=ddp",
       "--train.micro_batch=4"},
      {"-n", "2", "--model.preset=gpt-tiny", "--train.global_batch=32", "--parallel.pp=2"},
  };
  for (const Words& one : cases) {
    const Outcome trained = front_.run(common + one);
    ASSERT_EQ(trained.code, 0) << trained.err;
    const nlohmann::json summary = nlohmann::json::parse(read_file(run_file("summary.json")));
    const double ratio = summary["predicted_peak_bytes"].get<double>() / summary["peak_bytes"].get<double>();
    std::printf("%s %s: predicted over measured peak %.3f\n", one[2].c_str(), one.back().c_str(), ratio);
    EXPECT_NEAR(ratio, 1.0, 0.1) << one[2] << " " << one.back();
  }
}

}  // namespace
}  // namespace trireme::cli
