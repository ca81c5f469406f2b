#include "trireme/plan/presets.h"

#include <gtest/gtest.h>

#include <set>
#include <utility>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {
namespace {

int64_t params_of(const std::string& preset, int64_t seq_len = 128) {
  return describe(find_preset(preset).model, seq_len).params;
}

TEST(Presets, HaveThePublishedParameterCounts) {
  EXPECT_EQ(params_of("gpt2-124m"), 124439808);
  EXPECT_EQ(params_of("gpt2-1.5b"), 1557611200);
  EXPECT_EQ(params_of("llama-1b"), 1235814400);
  EXPECT_EQ(params_of("llama-8b"), 8030261248);
  EXPECT_EQ(params_of("llama-70b"), 70553706496);
}

TEST(Presets, MiniGptsHaveTheCountsOfTheirShapes) {
  constexpr int64_t kVocab = 50257, kPositions = 1024, kLayers = 8;
  const auto params = [](int64_t d) {
    return (kVocab + kPositions) * d + kLayers * (12 * d * d + 13 * d) + 2 * d;
  };
  EXPECT_EQ(params_of("mini-gpt-153m"), params(1024));
  EXPECT_EQ(params_of("mini-gpt-512m"), params(2048));
}

TEST(Presets, TinyOnesAreTiny) {
  for (const char* name : {"gpt-tiny", "llama-tiny", "mlp"}) {
    EXPECT_GT(params_of(name), 500'000) << name;
    EXPECT_LT(params_of(name), 1'000'000) << name;
  }
}

TEST(Presets, AreFoundByUniqueNames) {
  std::set<std::string> names;
  for (const Preset& preset : presets()) {
    EXPECT_EQ(&find_preset(preset.name), &preset);
    EXPECT_FALSE(preset.summary.empty()) << preset.name;
    names.insert(preset.name);
  }
  EXPECT_EQ(names.size(), presets().size());
}

TEST(Presets, AllLoadAsAConfig) {
  for (const Preset& preset : presets()) {
    const ResolvedConfig resolved = load({.overrides = {"model.preset=" + preset.name}}, Environment());
    EXPECT_EQ(resolved.config.model.d_model, preset.model.d_model) << preset.name;
    EXPECT_EQ(resolved.config.model.preset, preset.name);
  }
}

TEST(Presets, AModelIsCalledByItsPresetAndWhatChangedIt) {
  const auto text = [](std::vector<std::string> overrides) {
    const Config config = load({.overrides = std::move(overrides)}, Environment()).config;
    return preset_text(config.model, config.data.seq_len);
  };
  for (const Preset& preset : presets()) EXPECT_EQ(text({"model.preset=" + preset.name}), preset.name);
  EXPECT_EQ(text({}), "custom");
  EXPECT_EQ(text({"model.preset=gpt-tiny", "model.n_layers=3", "data.seq_len=64"}),
            "gpt-tiny, changed: n_layers");
  EXPECT_EQ(text({"model.preset=resnet18-cifar", "model.depth=8", "model.width=16"}),
            "resnet18-cifar, changed: depth, width");
  EXPECT_EQ(text({"model.preset=lenet", "model.weights=here"}), "lenet");
  EXPECT_EQ(text({"model.preset=llama-1b", "adapter.kind=lora", "adapter.rank=4", "adapter.weights=here"}),
            "llama-1b, changed: adapter.kind, adapter.rank");
}

TEST(Presets, UnknownNameSuggestsTheNearest) {
  try {
    find_preset("gpt2-124");
    FAIL() << "accepted gpt2-124";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("did you mean 'gpt2-124m'"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace trireme::plan
