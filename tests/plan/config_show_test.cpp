// The config written out: YAML that reads back, JSON schema, help text.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "trireme/base/env.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/plan/config.h"
#include "trireme/plan/presets.h"

namespace trireme::plan {
namespace {

using Value = std::variant<int64_t, double, bool, std::string>;

std::map<std::string, Value> values_of(Config config) {
  std::map<std::string, Value> values;
  for (const Field& field : fields(config)) {
    values.emplace(field.key, value_of(field));
  }
  return values;
}

void expect_round_trip(const ResolvedConfig& resolved) {
  for (const bool with_origins : {false, true}) {
    const std::string yaml = to_yaml(resolved, with_origins);
    const ResolvedConfig again = load({.text = yaml}, Environment());
    EXPECT_EQ(values_of(again.config), values_of(resolved.config)) << yaml;
    EXPECT_EQ(to_yaml(again), to_yaml(resolved));
  }
}

TEST(ConfigYaml, DefaultsAndPresetsRoundTrip) {
  expect_round_trip(load({}, Environment()));
  for (const Preset& preset : presets()) {
    expect_round_trip(load({.overrides = {"model.preset=" + preset.name}}, Environment()));
  }
}

TEST(ConfigYaml, DoublesRoundTripBitForBit) {
  ResolvedConfig resolved = load({}, Environment());
  for (uint64_t i = 0; i < 300; ++i) {
    const double mantissa = 1.0 + static_cast<double>(mix64(1, i) >> 12) * 0x1p-52;
    const double value = std::ldexp(mantissa, static_cast<int>(mix64(2, i) % 600) - 400);
    resolved.config.optim.lr = value;
    resolved.config.optim.min_lr = value / 3.0;
    EXPECT_EQ(load({.text = to_yaml(resolved)}, Environment()).config.optim.lr, value);
    EXPECT_EQ(load({.text = to_yaml(resolved)}, Environment()).config.optim.min_lr, value / 3.0);
  }
}

TEST(ConfigYaml, IntegersRoundTripOverTheWholeRange) {
  ResolvedConfig resolved = load({}, Environment());
  for (const int64_t seed :
       {int64_t{0}, int64_t{1} << 53, (int64_t{1} << 53) + 1, int64_t{1000000000000000000}}) {
    resolved.config.seed = seed;
    EXPECT_EQ(load({.text = to_yaml(resolved)}, Environment()).config.seed, seed);
  }
}

TEST(ConfigYaml, StringsThatYamlWouldMisreadRoundTrip) {
  for (const std::string text : {"",
                                 " ",
                                 "\n",
                                 "a\nb\n",
                                 "true",
                                 "no",
                                 "null",
                                 "~",
                                 "3",
                                 "1e3",
                                 "# no comment",
                                 "a: b",
                                 "a #b",
                                 "- x",
                                 "'",
                                 "\"",
                                 "\\",
                                 "\\n",
                                 "tab\there",
                                 "caf\u00e9",
                                 "*x",
                                 "&x",
                                 "!x",
                                 "{a}",
                                 "[a]",
                                 "a,b",
                                 "%",
                                 "@",
                                 "`",
                                 "?",
                                 "\x01",
                                 "\x7f",
                                 " lead",
                                 "trail ",
                                 "---",
                                 "...",
                                 "\u2028",
                                 "<<",
                                 "=",
                                 "|",
                                 ">"}) {
    ResolvedConfig resolved = load({}, Environment());
    resolved.config.train.sample_prompt = text;
    resolved.config.data.path = text;
    expect_round_trip(resolved);
  }
}

TEST(ConfigYaml, HoldsEveryKeyOnceInTheOrderOfTheTable) {
  const std::string yaml = to_yaml(load({}, Environment()));
  Config table;
  size_t at = 0;
  for (const Field& field : fields(table)) {
    const std::string word = field.key.substr(field.key.find('.') + 1) + ": ";
    const size_t found = yaml.find(word, at);
    ASSERT_NE(found, std::string::npos) << field.key;
    at = found;
  }
}

TEST(ConfigYaml, NumbersLookLikeNumbersToOtherReaders) {
  // YAML 1.1 takes a float without a point for a string.
  const std::string yaml =
      to_yaml(load({.overrides = {"optim.lr=1e-5", "optim.min_lr=0", "optim.eps=2e-300"}}, Environment()));
  EXPECT_NE(yaml.find("  lr: 1.0e-05\n"), std::string::npos) << yaml;
  EXPECT_NE(yaml.find("  min_lr: 0.0\n"), std::string::npos) << yaml;
  EXPECT_NE(yaml.find("  eps: 2.0e-300\n"), std::string::npos) << yaml;
}

TEST(ConfigYaml, OriginsStandInOneColumn) {
  const ResolvedConfig resolved = load({.overrides = {"train.steps=7"}}, Environment());
  size_t column = 0, comments = 0;
  for (const std::string& line : split(to_yaml(resolved, true), '\n')) {
    const size_t at = line.find("  # ");
    if (at == std::string::npos) continue;
    column = column == 0 ? at : column;
    EXPECT_EQ(at, column) << line;
    ++comments;
    if (line.find("steps: 7 ") != std::string::npos && line.find("warmup") == std::string::npos) {
      EXPECT_TRUE(line.ends_with("  # --train.steps")) << line;
    }
  }
  Config table;
  EXPECT_EQ(comments, fields(table).size());
}

TEST(ConfigSchema, DescribesEveryFieldAndNothingElse) {
  const nlohmann::json schema = nlohmann::json::parse(json_schema());
  EXPECT_EQ(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
  EXPECT_EQ(schema["type"], "object");
  EXPECT_EQ(schema["additionalProperties"], false);
  Config table;
  size_t described = 0;
  for (const Field& field : fields(table)) {
    const size_t dot = field.key.find('.');
    const nlohmann::json* object = &schema;
    if (dot != std::string::npos) {
      object = &schema["properties"][field.key.substr(0, dot)];
      EXPECT_EQ((*object)["additionalProperties"], false) << field.key;
      EXPECT_EQ((*object)["type"], "object") << field.key;
    }
    const nlohmann::json& property = (*object)["properties"][field.key.substr(dot + 1)];
    EXPECT_EQ(property["description"], field.help) << field.key;
    static constexpr const char* kTypes[] = {"integer", "number", "boolean", "string"};
    const nlohmann::json type = kTypes[value_of(field).index()];
    EXPECT_EQ(property["type"], (field.is_mapping ? nlohmann::json{"object", type} : type)) << field.key;
    EXPECT_EQ(property.contains("enum"), !field.choices.empty()) << field.key;
    EXPECT_EQ(property.contains("minimum"), field.min.has_value()) << field.key;
    EXPECT_EQ(property.contains("maximum"), field.max.has_value()) << field.key;
    ++described;
  }
  size_t properties = 0;
  for (const auto& [name, property] : schema["properties"].items()) {
    properties += property.contains("properties") ? property["properties"].size() : 1;
  }
  EXPECT_EQ(properties, described);
}

TEST(ConfigHelp, HasOneAlignedLineAKey) {
  Config table;
  const std::vector<Field> all = fields(table);
  std::vector<std::string> lines = split(describe_fields(all), '\n');
  ASSERT_EQ(lines.back(), "");
  lines.pop_back();
  ASSERT_EQ(lines.size(), all.size());
  const size_t column = lines.front().find(all.front().help);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(lines[i].starts_with(all[i].key + " ")) << lines[i];
    EXPECT_EQ(lines[i].find(all[i].help, all[i].key.size()), column) << lines[i];
    for (const std::string& choice : all[i].choices)
      EXPECT_NE(lines[i].find(choice), std::string::npos) << lines[i];
  }
}

/// Keys that say which others count come before them: of models, those of their family's.
TEST(ConfigHelp, KeysOfASectionStandTogetherAndThoseThatChooseOthersComeFirst) {
  Config table;
  std::vector<std::string> sections, model;
  for (const Field& field : fields(table)) {
    const std::string section = split(field.key, '.').front();
    if (sections.empty() || sections.back() != section) sections.push_back(section);
    if (section == "model") model.push_back(field.key);
  }
  EXPECT_EQ(std::set<std::string>(sections.begin(), sections.end()).size(), sections.size());
  const auto place = [&](const char* key) { return std::ranges::find(model, key) - model.begin(); };
  for (const char* later : {"model.depth", "model.image_size", "model.channels_last"}) {
    EXPECT_LT(place("model.preset"), place(later)) << later;
    EXPECT_LT(place("model.family"), place(later)) << later;
  }
}

TEST(ConfigHelp, ShowsTheKeysThatAWordIsIn) {
  Config table;
  const auto named = [&](const char* word) {
    std::vector<std::string> keys;
    for (const Field& field : fields_named(fields(table), word)) keys.push_back(field.key);
    return keys;
  };
  EXPECT_EQ(named("warmup"), std::vector<std::string>{"optim.warmup_steps"});
  EXPECT_EQ(named("Val-Every"), std::vector<std::string>{"train.val_every"});
  EXPECT_EQ(named("pipeline.").size(), 8U);
  EXPECT_TRUE(named("nothing").empty());
  EXPECT_EQ(named("").size(), fields(table).size());
}

TEST(ConfigShow, NamesTheKeysThatDiffer) {
  Config a, b;
  EXPECT_TRUE(differing_keys(a, b).empty());
  b.seed = 7;
  b.checkpoint.every = 3;
  b.optim.lr *= 2;
  EXPECT_EQ(differing_keys(a, b), (std::vector<std::string>{"seed", "optim.lr", "checkpoint.every"}));
}

}  // namespace
}  // namespace trireme::plan
