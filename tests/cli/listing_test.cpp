// Verbs that list what is built in.
#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "tests/cli/front_process.h"
#include "trireme/base/text.h"
#include "trireme/plan/choices.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/presets.h"

namespace trireme::cli {
namespace {

// Parameter counts as their authors publish them.
TEST(Presets, CountPublishedParameters) {
  const std::map<std::string, int64_t> published = {
      {"gpt2-124m", 124439808}, {"llama-8b", 8030261248}, {"llama-70b", 70553706496}};
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

TEST(Presets, NetworksOfImagesHaveNoWidthOfTokens) {
  const FrontProcess front;
  for (const auto& row : front.run({"presets", "--json"}).json()["presets"]) {
    const bool images = row["family"] == "resnet" || row["family"] == "lenet";
    EXPECT_EQ(row.contains("d_model"), !images) << row;
    EXPECT_EQ(row.contains("image_size"), images) << row;
  }
  for (const std::string& line : split(front.run({"presets"}).out, '\n')) {
    if (line.starts_with("resnet18 ")) {
      std::istringstream words(line);
      std::string name, family, blocks, width, heads;
      words >> name >> family >> blocks >> width >> heads;
      EXPECT_EQ(width + heads, "--") << line;
    }
  }
}

TEST(Labs, AreListedWhereNoneIsNamed) {
  const FrontProcess front;
  const Outcome listed = front.run({"lab"});
  EXPECT_EQ(listed.code, 0) << listed.err;
  const auto labs = front.run({"lab", "--json"}).json()["labs"];
  ASSERT_EQ(labs.size(), plan::all_values<plan::ScheduleName>().size());
  for (const auto& lab : labs) {
    const std::string name = lab["name"];
    EXPECT_TRUE(contains(listed.out, "\n" + name + " ")) << listed.out;
    // One rank is refused after the name was understood.
    const Outcome run = front.run({"lab", name, "-n", "1"});
    EXPECT_TRUE(contains(run.err, "at least two ranks")) << run.err;
  }
}

TEST(ConfigKeys, AreThoseWithAWordInTheirNames) {
  const FrontProcess front;
  const auto keys = front.run({"config", "keys", "weight-decay", "--json"}).json()["keys"];
  ASSERT_EQ(keys.size(), 1U);
  EXPECT_EQ(keys[0]["key"], "optim.weight_decay");
  const Outcome decay = front.run({"config", "keys", "weight_decay"});
  for (const char* word : {"decoupled", "L2", "adamw has 0.1 and sgd 0"})
    EXPECT_TRUE(contains(decay.out, word)) << decay.out;
  const Outcome none = front.run({"config", "keys", "no-such-key"});
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(contains(none.err, "'no-such-key'")) << none.err;
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
