// Loading: sources, precedence, provenance, conversions, completion.
#include "trireme/plan/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::plan {
namespace {

using Variables = std::map<std::string, std::string>;

const Environment kNothing;

Config from_text(const std::string& text) {
  return load({.text = text}, kNothing).config;
}
Config from_override(const std::string& text) {
  return load({.overrides = {text}}, kNothing).config;
}

TEST(Config, WithoutSourcesIsTheDefaults) {
  const ResolvedConfig resolved = load({}, kNothing);
  const Config defaults;
  EXPECT_EQ(resolved.config.train.steps, defaults.train.steps);
  EXPECT_EQ(resolved.config.optim.lr, defaults.optim.lr);
  EXPECT_EQ(resolved.config.name, defaults.name);
  EXPECT_EQ(resolved.origins.at("train.steps"), "default");
}

const void* place_of(const Field& field) {
  if (const auto* word = std::get_if<WordRef>(&field.value)) return word->member;
  return std::visit(
      [](const auto& member) -> const void* {
        if constexpr (std::is_pointer_v<std::decay_t<decltype(member)>>) return member;
        return nullptr;
      },
      field.value);
}

TEST(Config, ALabelOfAPolicyIsItsNameAndItsSharding) {
  const auto parallel = [](const std::string& text) { return from_text(text).parallel; };
  EXPECT_EQ(parallel("parallel:\n  policy: fsdp:no_shard\n").sharding, Sharding::kNoShard);
  EXPECT_EQ(parallel("parallel:\n  policy: fsdp:no_shard\n").policy, PolicyName::kFsdp);
  EXPECT_EQ(parallel("parallel:\n  sharding: no_shard\n  policy: fsdp:full_shard\n").sharding,
            Sharding::kFullShard)
      << "the later one wins";
  const ResolvedConfig resolved = load({.overrides = {"parallel.policy=fsdp:shard_grad_op"}}, kNothing);
  EXPECT_EQ(resolved.origins.at("parallel.sharding"), "--parallel.policy");
  const Config again = from_text(to_yaml(resolved));
  EXPECT_EQ(again.parallel.sharding, Sharding::kShardGradOp);
  EXPECT_THROW(from_override("parallel.policy=fsdp:nothing"), ConfigError);
  EXPECT_NE(json_schema().find("\"fsdp:hybrid_shard\""), std::string::npos);
}

TEST(Config, TableNamesEveryKeyOnceWithHelp) {
  Config config;
  std::set<std::string> keys;
  std::set<const void*> places;
  for (const Field& field : fields(config)) {
    EXPECT_TRUE(keys.insert(field.key).second) << field.key;
    EXPECT_TRUE(places.insert(place_of(field)).second) << field.key;
    EXPECT_FALSE(field.help.empty()) << field.key;
  }
  EXPECT_TRUE(keys.contains("model.preset"));
  EXPECT_TRUE(keys.contains("precision.reduce"));
}

TEST(Config, DefaultsObeyTheirOwnRules) {
  Config config;
  for (const Field& field : fields(config)) {
    if (!field.choices.empty()) {
      const std::string value = std::get<std::string>(value_of(field));
      EXPECT_NE(std::find(field.choices.begin(), field.choices.end(), value), field.choices.end())
          << field.key;
    }
    const double* real = nullptr;
    if (const auto* pointer = std::get_if<double*>(&field.value)) real = *pointer;
    if (real == nullptr) continue;
    EXPECT_GE(*real, field.min.value_or(*real)) << field.key;
    EXPECT_LE(*real, field.max.value_or(*real)) << field.key;
  }
}

TEST(Config, EveryWholeNumberHasALargest) {
  Config config;
  for (const Field& field : fields(config)) {
    const bool whole = std::holds_alternative<int64_t*>(field.value);
    EXPECT_TRUE(!whole || field.max) << field.key;
  }
}

TEST(Config, ReadsEveryTypeFromYaml) {
  const Config config = from_text(
      "name: first\n"
      "train: {steps: 7, grad_clip: 0.5}\n"
      "model:\n"
      "  tie_embeddings: no\n"
      "optim:\n"
      "  lr: 6e-4\n");
  EXPECT_EQ(config.name, "first");
  EXPECT_EQ(config.train.steps, 7);
  EXPECT_EQ(config.train.grad_clip, 0.5);
  EXPECT_FALSE(config.model.tie_embeddings);
  EXPECT_EQ(config.optim.lr, 6e-4);
}

TEST(Config, EmptyTextEmptySectionAndCommentsAreNothing) {
  EXPECT_EQ(from_text("").train.steps, Config().train.steps);
  EXPECT_EQ(from_text("# only a comment\n").train.steps, Config().train.steps);
  EXPECT_EQ(from_text("train:\n  # steps: 3\noptim: {}\n").train.steps, Config().train.steps);
}

TEST(Config, PrecedenceRisesFromPresetOverFileAndEnvironmentToOverrides) {
  const std::string yaml = "model:\n  preset: gpt-tiny\n  n_layers: 5\n";
  const Environment environment(Variables{{"TRIREME__MODEL__N_LAYERS", "6"}});
  const auto layers = [](const ResolvedConfig& resolved) { return resolved.config.model.n_layers; };
  EXPECT_EQ(layers(load({.text = "model: {preset: gpt-tiny}"}, kNothing)), 4);
  EXPECT_EQ(layers(load({.text = yaml}, kNothing)), 5);
  EXPECT_EQ(layers(load({.text = yaml}, environment)), 6);
  EXPECT_EQ(layers(load({.text = yaml, .overrides = {"model.n_layers=7"}}, environment)), 7);
  EXPECT_EQ(layers(load({.text = yaml, .overrides = {"model.n_layers=7", "model.n_layers=8"}}, environment)),
            8);
}

TEST(Config, APresetRanksBelowTheKeysOfItsOwnSourceAndAboveTheShapeOfEarlierOnes) {
  const std::string yaml = "model: {n_layers: 5, dropout: 0.1, weights: here}";
  const auto of_variables = [&](Variables variables, std::vector<std::string> overrides = {}) {
    return load({.text = yaml, .overrides = std::move(overrides)}, Environment(std::move(variables)));
  };
  const ResolvedConfig by_override = of_variables({}, {"model.preset=gpt2-124m"});
  EXPECT_EQ(by_override.config.model.n_layers, 12);
  EXPECT_EQ(by_override.config.model.dropout, 0.1) << "no part of the shape";
  EXPECT_EQ(by_override.config.model.weights, "here");
  EXPECT_EQ(by_override.origins.at("model.n_layers"), "preset gpt2-124m");
  EXPECT_EQ(by_override.origins.at("model.dropout"), "<text>:1:22");
  ASSERT_EQ(by_override.notes.size(), 1U);
  EXPECT_EQ(by_override.notes[0],
            "model.preset=gpt2-124m (--model.preset) replaces model.n_layers=5 (<text>:1:9)");

  const ResolvedConfig by_variable = of_variables({{"TRIREME__MODEL__PRESET", "gpt2-124m"}});
  EXPECT_EQ(by_variable.config.model.n_layers, 12);
  EXPECT_EQ(
      of_variables({{"TRIREME__MODEL__PRESET", "gpt2-124m"}}, {"model.n_layers=7"}).config.model.n_layers, 7);
  const ResolvedConfig together = of_variables({}, {"model.n_layers=7", "model.preset=gpt2-124m"});
  EXPECT_EQ(together.config.model.n_layers, 7) << "keys of one source stand above its preset, in any order";
  ASSERT_EQ(together.notes.size(), 1U) << "the preset replaced the 5 first";
  EXPECT_TRUE(load({.text = "model: {n_layers: 12}", .overrides = {"model.preset=gpt2-124m"}}, kNothing)
                  .notes.empty())
      << "nothing was replaced by another value";
}

TEST(Config, APresetOfImagesReplacesNetworksAndKeepsWhatTheImagesAre) {
  const std::string yaml =
      "model: {family: resnet, depth: 8, width: 8, norm: group, classes: 3, image_size: 64, label_smoothing: "
      "0.1}";
  const ResolvedConfig resolved =
      load({.text = yaml, .overrides = {"model.preset=resnet18-cifar"}}, kNothing);
  const VisionConfig& model = resolved.config.model.vision;
  EXPECT_EQ(model.depth, 18);
  EXPECT_EQ(model.width, 64);
  EXPECT_EQ(model.norm, ImageNorm::kBatch);
  EXPECT_EQ(model.classes, 3);
  EXPECT_EQ(model.image_size, 64);
  EXPECT_EQ(model.label_smoothing, 0.1);
  ASSERT_EQ(resolved.notes.size(), 1U);
  for (const char* key : {"model.depth=8", "model.width=8", "model.norm=group"})
    EXPECT_NE(resolved.notes[0].find(key), std::string::npos) << resolved.notes[0];
  const Config lenet = load({.text = yaml, .overrides = {"model.preset=lenet"}}, kNothing).config;
  EXPECT_EQ(lenet.model.family, ModelFamily::kLeNet);
}

TEST(Config, APresetOfTextRunsOverAFileOfAnotherShape) {
  for (const char* preset : {"llama-8b", "gpt2-1.5b", "resnet18-cifar"}) {
    const std::string override = std::string("model.preset=") + preset;
    EXPECT_NO_THROW(load({.text = "model: {family: gpt2, n_heads: 2, n_kv_heads: 2, d_model: 64, d_ff: 128}",
                          .overrides = {override}},
                         kNothing))
        << preset;
  }
}

TEST(Config, AResolvedPresetReadsBackWithTheKeysThatChangedIt) {
  const ResolvedConfig resolved =
      load({.overrides = {"model.preset=gpt-tiny", "model.n_layers=3"}}, kNothing);
  const ResolvedConfig again = load({.text = to_yaml(resolved)}, kNothing);
  EXPECT_EQ(again.config.model.n_layers, 3);
  EXPECT_TRUE(again.notes.empty());
}

TEST(Config, WeightDecayIsThatWhichTheOptimizerUsuallyHas) {
  EXPECT_EQ(from_text("").optim.weight_decay, 0.1);
  EXPECT_EQ(from_text("optim: {name: sgd}").optim.weight_decay, 0.0);
  EXPECT_EQ(from_text("training: {optimizer: sgd}").optim.weight_decay, 0.0) << "keys of other trainers";
  EXPECT_EQ(from_text("optim: {name: sgd, weight_decay: 0.1}").optim.weight_decay, 0.1)
      << "as old runs have it";
  const ResolvedConfig sgd = load({.overrides = {"optim.name=sgd"}}, kNothing);
  EXPECT_EQ(sgd.origins.at("optim.weight_decay"), "derived: optim.name");
  EXPECT_EQ(load({}, kNothing).origins.at("optim.weight_decay"), "derived: optim.name");
  EXPECT_EQ((OptimConfig{.name = OptimizerName::kSgd}.weight_decay), 0.0) << "of programs as well";
  for (const OptimizerName name : all_values<OptimizerName>()) {
    EXPECT_EQ(from_override("optim.name=" + std::string(plan::name(name))).optim.weight_decay,
              usual_weight_decay(name));
  }
}

TEST(Config, AWarmUpEndsWithARunThatALaterSourceHasShortened) {
  const std::string yaml = "train: {steps: 400}\noptim: {warmup_steps: 20}\n";
  const auto with = [&](std::vector<std::string> overrides) {
    return load({.text = yaml, .overrides = std::move(overrides)}, kNothing);
  };
  const ResolvedConfig cut = with({"train.steps=6"});
  EXPECT_EQ(cut.config.optim.warmup_steps, 6);
  EXPECT_EQ(cut.origins.at("optim.warmup_steps"), "derived: train.steps");
  ASSERT_EQ(cut.notes.size(), 1U);
  EXPECT_EQ(cut.notes[0], "optim.warmup_steps=20 (<text>:2:9) is cut to train.steps=6 (--train.steps)");
  EXPECT_EQ(with({"train.steps=20"}).config.optim.warmup_steps, 20);
  EXPECT_TRUE(with({"train.steps=20"}).notes.empty());
  EXPECT_THROW(with({"train.steps=6", "optim.warmup_steps=7"}), ConfigError) << "both from one source";
  EXPECT_THROW(with({"optim.warmup_steps=401"}), ConfigError) << "the warm-up has the last word";
  // A file that counts in epochs, tried for a few steps.
  const ResolvedConfig epochs =
      load({.text = "train: {epochs: 3}\noptim: {warmup_steps: 200}\n", .overrides = {"train.epochs=0"}},
           kNothing);
  EXPECT_EQ(epochs.config.optim.warmup_steps, TrainConfig{}.steps);
}

TEST(Config, TextIsReadAsBytesUnlessATokenizerIsNamed) {
  EXPECT_EQ(load({}, kNothing).config.data.tokenizer, kByteTokenizer);
  const ResolvedConfig named = load({.overrides = {"data.tokenizer=/models/a: b.json"}}, kNothing);
  EXPECT_EQ(named.config.data.tokenizer, "/models/a: b.json");
  EXPECT_EQ(from_text(to_yaml(named)).data.tokenizer, "/models/a: b.json");
  EXPECT_THROW(from_override("model.vocab_size=100"), ConfigError);
  EXPECT_NO_THROW(load({.overrides = {"model.vocab_size=100", "data.tokenizer=small.json"}}, kNothing));
}

TEST(Config, LastPresetWins) {
  const ResolvedConfig resolved =
      load({.text = "model: {preset: gpt-tiny}", .overrides = {"model.preset=llama-tiny"}}, kNothing);
  EXPECT_EQ(resolved.config.model.family, ModelFamily::kLlama);
  EXPECT_EQ(load({.text = "model: {preset: llama-tiny}", .overrides = {"model.preset="}}, kNothing)
                .config.model.family,
            ModelFamily::kGpt2);
}

TEST(Config, EveryValueKnowsWhereItCameFrom) {
  const ResolvedConfig resolved =
      load({.text = "model:\n  preset: gpt-tiny\ntrain:\n  val_every: 5\n  steps: 9\n",
            .overrides = {"optim.lr=0.01", "train.steps=10"}},
           Environment(Variables{{"TRIREME__DATA__SEQ_LEN", "64"}}));
  EXPECT_EQ(resolved.origins.at("model.preset"), "<text>:2:3");
  EXPECT_EQ(resolved.origins.at("model.d_model"), "preset gpt-tiny");
  EXPECT_EQ(resolved.origins.at("train.val_every"), "<text>:4:3");
  EXPECT_EQ(resolved.origins.at("train.steps"), "--train.steps");
  EXPECT_EQ(resolved.origins.at("optim.lr"), "--optim.lr");
  EXPECT_EQ(resolved.origins.at("data.seq_len"), "TRIREME__DATA__SEQ_LEN");
  EXPECT_EQ(resolved.origins.at("model.max_seq_len"), "derived: data.seq_len");
  EXPECT_EQ(resolved.origins.at("optim.beta1"), "default");
  Config table;
  EXPECT_EQ(resolved.origins.size(), fields(table).size());
}

TEST(Config, FileIsNamedInOrigins) {
  std::string pattern = (std::filesystem::temp_directory_path() / "trireme-config-XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const std::string path = pattern + "/a.yaml";
  write_file_atomic(path, "\ntrain:\n    steps: 3\n");
  const ResolvedConfig resolved = load({.path = path}, kNothing);
  EXPECT_EQ(resolved.config.train.steps, 3);
  EXPECT_EQ(resolved.origins.at("train.steps"), path + ":3:5");
  std::filesystem::remove_all(pattern);
}

TEST(Config, EnvironmentReachesTopLevelKeysAndSkipsEmptyValues) {
  const Environment environment(Variables{{"TRIREME__SEED", "7"},
                                          {"TRIREME__TRAIN__STEPS", ""},
                                          {"TRIREME_LAUNCHER", "trireme"},
                                          {"OTHER", "x"}});
  const Config config = load({}, environment).config;
  EXPECT_EQ(config.seed, 7);
  EXPECT_EQ(config.train.steps, Config().train.steps);
}

TEST(Config, OverrideKeysMayUseDashesAndValuesEqualSigns) {
  EXPECT_EQ(from_override("train.global-batch=32").train.global_batch, 32);
  EXPECT_EQ(from_override("train.sample_prompt=a=b").train.sample_prompt, "a=b");
  EXPECT_EQ(from_override("data.path=/data/x-y").data.path, "/data/x-y");
}

TEST(Config, BooleansHaveSixWords) {
  for (const char* word : {"true", "yes", "1", "True", "YES"}) {
    EXPECT_TRUE(from_override(std::string("model.tie_embeddings=") + word).model.tie_embeddings) << word;
  }
  for (const char* word : {"false", "no", "0", "False"}) {
    EXPECT_FALSE(from_override(std::string("model.tie_embeddings=") + word).model.tie_embeddings) << word;
  }
}

TEST(Config, NumbersMayHaveAPlusSign) {
  EXPECT_EQ(from_text("optim: {lr: +1e-3}").optim.lr, 1e-3);
  EXPECT_EQ(from_text("train: {steps: +7}").train.steps, 7);
  EXPECT_EQ(from_text("train: {steps: +1e3}").train.steps, 1000);
}

TEST(Config, IntegersMayBeWrittenAsWholeFloats) {
  EXPECT_EQ(from_override("train.steps=1e3").train.steps, 1000);
  EXPECT_EQ(from_override("train.steps=20.0").train.steps, 20);
  EXPECT_EQ(from_override("seed=1000000000000000000").seed, 1000000000000000000);
}

TEST(Config, ModelIsCompleteAfterLoading) {
  const Config config =
      load({.overrides = {"model.d_model=64", "model.n_heads=2", "data.seq_len=32"}}, kNothing).config;
  EXPECT_EQ(config.model.n_kv_heads, 2);
  EXPECT_EQ(config.model.d_ff, 256);
  EXPECT_EQ(config.model.max_seq_len, 32);
}

TEST(Config, EveryChoiceIsReadAndWrittenByItsName) {
  Config table;
  for (const Field& field : fields(table)) {
    if (field.key == "model.preset") continue;
    for (const std::string& choice : field.choices) {
      if (choice.find(':') != std::string::npos) continue;  // a label sets two keys
      Config config;
      for (const Field& chosen : fields(config)) {
        if (chosen.key != field.key) continue;
        const auto& word = std::get<WordRef>(chosen.value);
        ASSERT_TRUE(word.write(word.member, choice)) << field.key << " " << choice;
        EXPECT_EQ(word.read(word.member), choice) << field.key;
        EXPECT_FALSE(word.write(word.member, choice + "x")) << field.key;
        EXPECT_EQ(word.read(word.member), choice) << "a word that means nothing changes nothing";
      }
    }
  }
}

TEST(Config, ReshardingAfterForwardIsAWordOrANumberOfRanks) {
  const auto reshard = [](const std::string& text) {
    return from_override("parallel.reshard_after_forward=" + text).parallel.reshard_after_forward;
  };
  using Kind = ReshardAfterForward::Kind;
  EXPECT_EQ(reshard("auto").kind, Kind::kAsPolicy);
  EXPECT_EQ(reshard("true").kind, Kind::kFree);
  EXPECT_EQ(reshard("false").kind, Kind::kKeep);
  EXPECT_EQ(reshard("8"), (ReshardAfterForward{.kind = Kind::kOver, .ranks = 8}));
  for (const char* text : {"auto", "true", "false", "1", "16"}) EXPECT_EQ(to_text(reshard(text)), text);
}

TEST(Config, FeedForwardModelsNeedNoHeads) {
  EXPECT_EQ(load({.overrides = {"model.family=mlp", "model.d_model=50"}}, kNothing).config.model.d_model, 50);
}

}  // namespace
}  // namespace trireme::plan
