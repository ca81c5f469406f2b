// data.mixture: as YAML has it, as one word, and what it refuses.
#include <gtest/gtest.h>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/config.h"

namespace trireme::plan {
namespace {

const std::vector<MixtureSource> kTwo = {{"code", "a b.txt", 0.7}, {"web", "w", 1.0}};

Config load_yaml(const std::string& data) {
  return load({.text = "data:\n" + data}, Environment()).config;
}

std::string refusal_of_mixture(const std::string& text, const std::vector<std::string>& more = {}) {
  try {
    std::vector<std::string> overrides = {"data.mixture=" + text};
    overrides.insert(overrides.end(), more.begin(), more.end());
    load({.overrides = overrides}, Environment());
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(MixtureConfig, IsReadInAnyFormOfYamlAndInAnyOrder) {
  EXPECT_EQ(load_yaml("  mixture:\n    web: w\n    code:\n      path: a b.txt\n      weight: 0.7\n")
                .data.mixture.sources,
            kTwo);
  EXPECT_EQ(
      load_yaml("  mixture: {code: {weight: 0.7, path: a b.txt}, web: {path: w}}\n").data.mixture.sources,
      kTwo);
  EXPECT_EQ(load({.overrides = {"data.mixture={web: w, code: {path: a b.txt, weight: 0.7}}"}}, Environment())
                .config.data.mixture.sources,
            kTwo);
  EXPECT_TRUE(load_yaml("  seq_len: 8\n").data.mixture.sources.empty());
}

TEST(MixtureConfig, ReadsWhatItWrites) {
  const ResolvedConfig resolved =
      load({.overrides = {"data.mixture={web: w, code: {path: a b.txt, weight: 0.7}}"}}, Environment());
  for (const bool origins : {false, true}) {
    const Config again = load({.text = to_yaml(resolved, origins)}, Environment()).config;
    EXPECT_EQ(again.data.mixture.sources, kTwo);
    EXPECT_TRUE(differing_keys(resolved.config, again).empty());
  }
  const ResolvedConfig none = load({}, Environment());
  EXPECT_TRUE(load({.text = to_yaml(none)}, Environment()).config.data.mixture.sources.empty());
}

TEST(MixtureConfig, RefusesWhatIsWrongByName) {
  for (const char* weight : {"0", "-1", "nan", "much"})
    test::expect_mentions(refusal_of_mixture(std::string("{a: {path: x, weight: ") + weight + "}}"),
                          {"a has weight", weight, "above 0"});
  test::expect_mentions(refusal_of_mixture("{a: {path: x, wieght: 2}}"), {"a has 'wieght'"});
  test::expect_mentions(refusal_of_mixture("{a: {weight: 2}}"), {"a has no path"});
  test::expect_mentions(refusal_of_mixture("{a: [x]}"), {"a has no path"});
  test::expect_mentions(refusal_of_mixture("{a/b: x}"), {"a/b"});
  test::expect_mentions(refusal_of_mixture("{a: x, a: y}"), {"a is given twice"});
  test::expect_mentions(refusal_of_mixture("{a: x, a: y}"), {"(from --data.mixture)"});
  test::expect_mentions(refusal_of_mixture("{a: {path: x\xff}}"), {"the path of a is not UTF-8"});
  test::expect_mentions(refusal_of_mixture("x"), {"data.mixture", "path: TEXT"});
  test::expect_mentions(refusal_of_mixture("{a: x}", {"data.path=y"}), {"data.path=y", "remove one"});
  test::expect_mentions(refusal_of_mixture("{a: x}", {"model.family=resnet"}), {"data.mixture", "images"});
}

}  // namespace
}  // namespace trireme::plan
