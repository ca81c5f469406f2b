// Adapters with dropout on ranks that are processes, of which each has a random generator of its own.
#include <fmt/format.h>

#include <set>
#include <string>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

TEST_F(Worker, AdaptersDropTheSameOnEveryRankUnderEveryPolicyAndInBlocksThatAreComputedAgain) {
  const Words words =
      kTiny +
      Words{"-n", "2", "--train.steps=3", "--adapter.kind=lora", "--adapter.rank=2", "--adapter.dropout=0.3"};
  std::set<std::string> digests;
  const auto train = [&](const Words& more) -> std::string {
    const Outcome outcome = front_.run(words + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(read_file(run_file("summary.json")))["weights_digest"];
  };
  for (const char* policy : {"ddp", "zero1", "zero2", "zero3", "fsdp"})
    digests.insert(train({fmt::format("--parallel.policy={}", policy)}));
  digests.insert(train({"--memory.recompute=block"}));
  EXPECT_EQ(digests.size(), 1u);
  EXPECT_FALSE(digests.contains(train({"--adapter.dropout=0"})));
}

}  // namespace
}  // namespace trireme::cli
