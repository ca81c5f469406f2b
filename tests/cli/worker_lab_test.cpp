// `bench run` with its real worker, where a result must be refused; docs/guide/benchmarks.md has those that
// hold.
#include <filesystem>
#include <map>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"
#include "trireme/plan/rates.h"

namespace trireme::cli {
namespace {

const Words kTinyLab = {"--device=cpu",
                        "--data.path=text.txt",
                        "--model.n_layers=2",
                        "--model.d_model=32",
                        "--model.n_heads=2",
                        "--model.n_kv_heads=1",
                        "--model.d_ff=64",
                        "--data.seq_len=32",
                        "--train.global_batch=4",
                        "--replicates",
                        "1",
                        "--iterations",
                        "8",
                        "--warmup",
                        "2",
                        "--out",
                        "out"};

/// The hook leaves out nearly all of the gradients: the runs are real, and so is the difference.
TEST_F(Worker, BenchRunBlocksALossyHookThatIsSaidToChangeNothing) {
  write_file_atomic(front_.file("mine.yaml"), "optim: {lr: 0.01}\nparallel: {policy: ddp, hook_start: 1}\n");
  const Outcome outcome =
      front_.run(Words{"bench", "run", "--config", "mine.yaml", "--arms", "parallel.comm_hook=none,topk",
                       "-n", "2", "--model.family=llama", "--parallel.hook_density=0.000001"} +
                 kTinyLab);
  EXPECT_EQ(outcome.code, 8) << outcome.err << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "is blocked: 'each arm gave what it owes' does not hold")) << outcome.out;
}

/// Rates of a machine on which everything takes a thousandth of the time, so that no share comes near 1.
void write_fast_rates(const std::string& path, int64_t ranks) {
  constexpr double kFaster = 1e3;
  plan::Rates rates = plan::usual_rates(plan::Device::kCpu);
  rates.ranks = ranks;
  rates.measured = true;
  for (auto& [dtype, grids] : rates.products) {
    for (plan::ProductGrid& grid : grids) {
      for (double& seconds : grid.seconds) seconds /= kFaster;
    }
  }
  for (auto& [dtype, memory] : rates.memory) memory.copy *= kFaster;
  write_file_atomic(path, plan::to_json(rates));
}

/// Real ranks leave a trace with operators of all kinds, and the FLOPs are those of their shapes.
TEST_F(Worker, BenchRunProfilesOneRankAndTwo) {
  for (const int64_t ranks : {1, 2}) {
    write_file_atomic(front_.file("mine.yaml"), "optim: {lr: 0.01}\nparallel: {policy: fsdp}\n");
    write_fast_rates(front_.file("rates.json"), ranks);
    std::filesystem::remove_all(front_.file("out"));
    const Outcome outcome =
        front_.run(Words{"bench", "run", "--config", "mine.yaml", "--arms", "memory.recompute=none,block",
                         "-n", std::to_string(ranks), "--model.family=llama", "--profile", "roofline",
                         "--probe", "rates.json"} +
                   kTinyLab);
    ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
    const auto target = nlohmann::json::parse(read_file(front_.file("out/results.json")))["targets"][0];
    ASSERT_EQ(target["profiles"].size(), 2u);
    for (const auto& profile : target["profiles"]) {
      EXPECT_EQ(profile["error"], "");
      EXPECT_EQ(profile["of"], "CPU operators");
      const auto trace = nlohmann::json::parse(read_file(front_.file(profile["trace"])));
      EXPECT_GT(trace["traceEvents"].size(), 100u);
      std::map<std::string, nlohmann::json> rates;
      for (const auto& one : profile["rates"]) rates[one["group"]] = one;
      for (const char* kind : {"GEMM", "attention", "norm", "rope", "activation", "loss", "optimizer"}) {
        ASSERT_TRUE(rates.contains(kind)) << kind << profile["groups"];
        EXPECT_GT(rates[kind]["share_of_roof"].get<double>(), 0.0) << kind;
        EXPECT_LT(rates[kind]["share_of_roof"].get<double>(), 1.0) << kind;
      }
      EXPECT_TRUE(rates["elementwise"]["bytes"].is_null());
    }
    // Matrices of two layers of q, k, v, output, gate, up and down: 32 (32 + 16 + 16 + 32 + 3 x 64); each
    // takes 6 FLOPs a token, and 4 sequences of 32 tokens are shared by the ranks. The head has 32 x 256.
    const double weights = 2.0 * 32.0 * (32 + 16 + 16 + 32 + 3 * 64) + 32.0 * 256;
    const double tokens = 4.0 * 32.0 / static_cast<double>(ranks);
    for (const auto& one : target["profiles"][0]["rates"]) {
      if (one["group"] != "GEMM") continue;
      EXPECT_NEAR(one["flops"].get<double>(), 6.0 * weights * tokens, 1.0);
    }
  }
}

}  // namespace
}  // namespace trireme::cli
