// Every target of the registry is measured for real, on as many ranks as it takes, in one block of few steps:
// its runs end well, and what its arms owe holds.
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/bench/target.h"

namespace trireme::cli {
namespace {

constexpr size_t kShares = 4;  ///< tests that run beside each other

class EveryTarget : public Worker, public ::testing::WithParamInterface<size_t> {
 protected:
  void expect_measured(const std::vector<std::string>& targets, int64_t ranks) {
    if (targets.empty()) return;
    std::filesystem::remove_all(front_.file("out"));
    const Outcome outcome = front_.run({"bench",        "run",
                                        "--targets",    join(targets, ","),
                                        "-n",           std::to_string(ranks),
                                        "--device=cpu", "--data.path=text.txt",
                                        "--iterations", "3",
                                        "--warmup",     "1",
                                        "--replicates", "1",
                                        "--profile",    "none",
                                        "--out",        "out",
                                        "--format",     "json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    const auto results = nlohmann::json::parse(read_file(front_.file("out/results.json")));
    ASSERT_EQ(results["targets"].size(), targets.size());
    for (const auto& target : results["targets"])
      EXPECT_EQ(target["state"], "measured") << target["name"] << ": " << target["reason"];
  }
};

TEST_P(EveryTarget, IsMeasuredForReal) {
  std::map<int64_t, std::vector<std::string>> by_ranks;
  const std::vector<bench::Target>& all = bench::all_targets();
  for (size_t i = GetParam(); i < all.size(); i += kShares) {
    if (all[i].needs_gpu || !all[i].on_cpu_with.empty()) continue;
    by_ranks[all[i].ranks.front()].push_back(all[i].name);
  }
  for (const auto& [ranks, targets] : by_ranks) expect_measured(targets, ranks);
}

INSTANTIATE_TEST_SUITE_P(Share, EveryTarget, ::testing::Range<size_t>(0, kShares));

}  // namespace
}  // namespace trireme::cli
