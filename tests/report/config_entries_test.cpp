#include "trireme/report/config_entries.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "trireme/base/env.h"
#include "trireme/plan/config.h"

namespace trireme::report {
namespace {

std::string config_of(std::vector<std::string> overrides) {
  return plan::to_yaml(plan::load({.overrides = std::move(overrides)}, Environment()), true);
}

TEST(ConfigEntries, AreKeysValuesAndOrigins) {
  const auto entries = read_config_entries(
      "name: \"a # b\"         # --name\ntrain:\n  steps: 40\n  sample_prompt: \"x\\\" # y\"  # "
      "file.yaml:3:5\n");
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].value, "\"a # b\"");
  EXPECT_EQ(entries[0].origin, "--name");
  EXPECT_EQ(entries[1].key, "train.steps");
  EXPECT_EQ(entries[1].origin, "");
  EXPECT_EQ(entries[2].value, "\"x\\\" # y\"");
  EXPECT_EQ(entries[2].origin, "file.yaml:3:5");
}

TEST(ConfigEntries, AreAllOfAConfigAndMakeItAgain) {
  const std::string yaml = config_of({"name=a # b", "train.sample_prompt=x\" y"});
  EXPECT_EQ(config_text(read_config_entries(yaml)), yaml);
  plan::Config config;
  EXPECT_EQ(read_config_entries(yaml).size(), plan::fields(config).size());
}

TEST(ConfigEntries, KeepTheirOriginsWhereTheirValuesStay) {
  const std::string before = config_of({"optim.lr=1e-3", "train.steps=40"});
  const std::string after =
      plan::to_yaml(plan::load({.text = before, .overrides = {"train.steps=60"}}, Environment()), true);
  const auto merged = read_config_entries(with_origins_of(before, after));
  const auto origin_of = [&](const char* key) {
    return std::ranges::find(merged, key, &ConfigEntry::key)->origin;
  };
  EXPECT_EQ(origin_of("optim.lr"), "--optim.lr");
  EXPECT_EQ(origin_of("train.steps"), "--train.steps");
  EXPECT_EQ(origin_of("seed"), "default");
  EXPECT_TRUE(same_values(before, with_origins_of("", before)));
  EXPECT_FALSE(same_values(before, after));
}

}  // namespace
}  // namespace trireme::report
