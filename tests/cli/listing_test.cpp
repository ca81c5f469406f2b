// Verbs that list what is built in.
#include <gtest/gtest.h>

#include <map>

#include "tests/cli/front_process.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/presets.h"

namespace trireme::cli {
namespace {

// Parameter counts as their authors publish them.
TEST(Presets, CountPublishedParameters) {
  const std::map<std::string, int64_t> published = {{"gpt2-124m", 124439808}, {"llama-8b", 8030261248}};
  const auto rows = FrontProcess().run({"presets", "--json"}).json()["presets"];
  EXPECT_EQ(rows.size(), plan::presets().size());
  size_t found = 0;
  for (const auto& row : rows) {
    const auto count = published.find(row["name"]);
    if (count == published.end()) continue;
    EXPECT_EQ(row["params"], count->second) << row["name"];
    ++found;
  }
  EXPECT_EQ(found, published.size());
}

TEST(Presets, TableHasARowEach) {
  const std::string out = FrontProcess().run({"presets"}).out;
  for (const plan::Preset& preset : plan::presets())
    EXPECT_TRUE(contains(out, "\n" + preset.name + " ")) << out;
}

TEST(PlanPolicy, PrintsTheTableOrOneRow) {
  const FrontProcess front;
  const auto rows = front.run({"plan", "policy", "--json"}).json()["policies"];
  ASSERT_EQ(rows.size(), plan::policies().size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const plan::Policy& policy = plan::policies()[i];
    EXPECT_EQ(rows[i]["label"], policy.label());
    EXPECT_EQ(rows[i]["hybrid"], policy.hybrid);
    EXPECT_EQ(rows[i]["shard_optimizer"], policy.shard_optimizer);
    EXPECT_EQ(rows[i]["shard_gradients"], policy.shard_gradients);
    EXPECT_EQ(rows[i]["shard_parameters"], policy.shard_parameters);
  }
  const Outcome one = front.run({"plan", "policy", "zero1"});
  EXPECT_TRUE(contains(one.out, "zero1"));
  EXPECT_FALSE(contains(one.out, "zero2"));
  EXPECT_EQ(front.run({"plan", "policy", "fsdp", "--json"}).json()["policies"].size(), 5u);
  EXPECT_EQ(front.run({"plan", "policy", "fsdp:no_shard", "--json"}).json()["policies"].size(), 1u);
  const Outcome none = front.run({"plan", "policy", "zero9"});
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(contains(none.err, "zero9")) << none.err;
}

}  // namespace
}  // namespace trireme::cli
