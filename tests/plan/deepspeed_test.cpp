// DeepSpeed's files: what each key becomes, and what is refused.
#include "trireme/plan/deepspeed.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/base/text.h"
#include "trireme/plan/deepspeed_keys.h"

namespace trireme::plan {
namespace {

using test::expect_refusal;
using DsJson = nlohmann::ordered_json;
using Keys = std::map<std::string, std::string>;

DeepSpeedFile file_of(const std::string& text, std::optional<int64_t> ranks = 2) {
  return {.path = "ds.json", .text = text, .ranks = [ranks](const Config&) { return ranks; }};
}

ResolvedConfig resolved_with(const std::string& text, const std::string& yaml = "",
                             std::optional<int64_t> ranks = 2) {
  return load({.text = yaml}, file_of(text, ranks), Environment());
}

std::string value_in(Config config, const std::string& key) {
  for (const Field& field : fields(config)) {
    if (field.key == key)
      return std::visit([](const auto& value) { return fmt::format("{}", value); }, value_of(field));
  }
  return "no such key";
}

void expect_keys(const Config& config, const Keys& expected) {
  for (const auto& [key, value] : expected) EXPECT_EQ(value_in(config, key), value) << key;
}

bool some_note_has(const std::vector<std::string>& notes, const std::string& words) {
  return std::ranges::any_of(notes, [&](const std::string& note) { return note.find(words) != note.npos; });
}

/// A value as a file has it: of "false" the boolean, of "none" the string.
DsJson json_value(const std::string& text) {
  const DsJson value = DsJson::parse(text, nullptr, false);
  return value.is_discarded() ? DsJson(text) : value;
}

/// A file of flat keys.
std::string file_with(const Keys& flat) {
  DsJson root = DsJson::object();
  for (const auto& [key, value] : flat) {
    DsJson* node = &root;
    for (const std::string& word : split(key, '.')) node = &(*node)[word];
    *node = json_value(value);
  }
  return root.dump();
}

// ---- every key of the table

/// Two values of a key that only means something beside others.
struct Example {
  Keys beside;
  std::string one, other;
};

const std::map<std::string, Example>& examples() {
  static const Keys adam = {{"optimizer.type", "AdamW"}}, sgd = {{"optimizer.type", "SGD"}},
                    decay = {{"scheduler.type", "WarmupDecayLR"},
                             {"scheduler.params.total_num_steps", "100"},
                             {"scheduler.params.warmup_num_steps", "10"}},
                    cosine = {{"scheduler.type", "WarmupCosineLR"},
                              {"scheduler.params.total_num_steps", "100"},
                              {"scheduler.params.warmup_num_steps", "10"}};
  static const std::map<std::string, Example> table = {
      {"train_batch_size", {{}, "8", "32"}},
      {"train_micro_batch_size_per_gpu", {{}, "2", "4"}},
      {"gradient_accumulation_steps", {{{"train_batch_size", "16"}}, "2", "4"}},
      {"optimizer.type", {{}, "AdamW", "SGD"}},
      {"optimizer.params.lr", {adam, "0.1", "0.2"}},
      {"optimizer.params.betas", {adam, "[0.8, 0.9]", "[0.9, 0.95]"}},
      {"optimizer.params.eps", {adam, "1e-6", "1e-8"}},
      {"optimizer.params.weight_decay", {adam, "0", "0.01"}},
      {"optimizer.params.momentum", {sgd, "0.5", "0.9"}},
      {"optimizer.params.nesterov",
       {{{"optimizer.type", "SGD"}, {"optimizer.params.momentum", "0.9"}}, "false", "true"}},
      {"optimizer.params.adam_w_mode", {adam, "false", "true"}},
      {"scheduler.type",
       {{{"scheduler.params.total_num_steps", "100"}, {"scheduler.params.warmup_num_steps", "10"}},
        "WarmupDecayLR",
        "WarmupCosineLR"}},
      {"scheduler.params.warmup_min_lr", {decay, "0", "0.0001"}},
      {"scheduler.params.warmup_max_lr", {decay, "0.1", "0.2"}},
      {"scheduler.params.warmup_num_steps", {decay, "5", "10"}},
      {"scheduler.params.warmup_type", {decay, "linear", "log"}},
      {"scheduler.params.total_num_steps", {decay, "100", "200"}},
      {"scheduler.params.warmup_min_ratio", {cosine, "0", "0.1"}},
      {"scheduler.params.cos_min_ratio", {cosine, "0.1", "0.2"}},
      {"fp16.enabled", {{}, "false", "true"}},
      {"fp16.loss_scale", {{{"fp16.enabled", "true"}}, "0", "128"}},
      {"fp16.initial_scale_power", {{}, "12", "16"}},
      {"fp16.loss_scale_window", {{}, "500", "1000"}},
      {"fp16.hysteresis", {{}, "1", "2"}},
      {"fp16.min_loss_scale", {{}, "1", "2"}},
      {"bf16.enabled", {{}, "false", "true"}},
      {"bfloat16.enabled", {{}, "false", "true"}},
      {"data_types.grad_accum_dtype", {{{"bf16.enabled", "true"}}, "fp32", "bf16"}},
      {"communication_data_type", {{}, "fp32", "bf16"}},
      {"sequence_parallel_size", {{}, "1", "2"}},
      {"tensor_parallel.autotp_size", {{}, "1", "2"}},
      {"zero_optimization.zero_hpz_partition_size", {{{"zero_optimization.stage", "3"}}, "1", "2"}}};
  return table;
}

Example example_of(const DeepSpeedKey& row) {
  if (const auto found = examples().find(std::string(row.key)); found != examples().end())
    return found->second;
  if (!row.words.empty()) return {{}, std::string(row.words[0].first), std::string(row.words[1].first)};
  switch (row.type) {
    case DeepSpeedType::kFlag:
      return {{}, "false", "true"};
    case DeepSpeedType::kWord:
      return {{}, "none", "cpu"};
    case DeepSpeedType::kWhole:
    case DeepSpeedType::kNumber:
    case DeepSpeedType::kNumbers:
    case DeepSpeedType::kAny:
      break;
  }
  return {{}, "3", "5"};
}

/// The key, and one below a section whose keys are alike.
std::string key_in_a_file(const DeepSpeedKey& row) {
  if (!row.key.ends_with(".*")) return std::string(row.key);
  return std::string(row.key.substr(0, row.key.size() - 1)) + "thing";
}

std::string file_for(const DeepSpeedKey& row, const std::string& value) {
  Keys flat = row.effect == DeepSpeedEffect::kTogether ? example_of(row).beside : Keys();
  if (row.key.starts_with("optimizer.params.") && !flat.contains("optimizer.type"))
    flat["optimizer.type"] = "AdamW";
  if (row.key == "optimizer.params.dampening") flat["optimizer.type"] = "SGD";
  if (row.key == "optimizer.legacy_fusion") flat["optimizer.type"] = "AdamW";
  if (row.key == "scheduler.params.last_batch_iteration")
    flat = examples().at("scheduler.params.warmup_type").beside;
  flat[key_in_a_file(row)] = value;
  return file_with(flat);
}

TEST(DeepSpeedKeys, ChangingAnAcceptedKeyChangesTheConfigOrPrints) {
  for (const DeepSpeedKey& row : deepspeed_keys()) {
    SCOPED_TRACE(row.key);
    const bool changes = row.effect == DeepSpeedEffect::kSets || row.effect == DeepSpeedEffect::kTogether;
    if (!changes) continue;
    const Example example = example_of(row);
    const ResolvedConfig one = resolved_with(file_for(row, example.one)),
                         other = resolved_with(file_for(row, example.other));
    EXPECT_TRUE(!differing_keys(one.config, other.config).empty() || one.notes != other.notes);
  }
}

TEST(DeepSpeedKeys, OfModelAndSequenceParallelismAreAxesOfTheMesh) {
  expect_keys(resolved_with(file_with({{"sequence_parallel_size", "2"}})).config, {{"parallel.cp", "2"}});
  expect_keys(resolved_with(file_with({{"tensor_parallel.autotp_size", "2"}})).config,
              {{"parallel.tp", "2"}});
  expect_keys(resolved_with(file_with({{"tensor_parallel.autotp_size", "0"}})).config,
              {{"parallel.tp", "1"}});
}

TEST(DeepSpeedKeys, AKeyThatNeedsNothingIsNamedInANote) {
  for (const DeepSpeedKey& row : deepspeed_keys()) {
    SCOPED_TRACE(row.key);
    if (row.effect != DeepSpeedEffect::kNeedless) continue;
    for (const std::string& value : {example_of(row).one, example_of(row).other})
      EXPECT_TRUE(some_note_has(resolved_with(file_for(row, value)).notes, key_in_a_file(row) + "=" + value));
    EXPECT_FALSE(row.about.empty());
  }
}

TEST(DeepSpeedKeys, WhatIsNotHereIsRefusedByName) {
  for (const DeepSpeedKey& row : deepspeed_keys()) {
    SCOPED_TRACE(row.key);
    const std::string key = key_in_a_file(row);
    if (row.effect == DeepSpeedEffect::kRefused)
      expect_refusal([&] { resolved_with(file_for(row, "true")); }, {"ds.json: " + key + " = true: "});
    if (row.effect != DeepSpeedEffect::kOnly) continue;
    const std::string accepted(row.accepted),
        other = accepted == example_of(row).one ? example_of(row).other : example_of(row).one;
    EXPECT_TRUE(some_note_has(resolved_with(file_for(row, accepted)).notes, key + "=" + accepted));
    expect_refusal([&] { resolved_with(file_for(row, other)); },
                   {"[plan.deepspeed] ds.json: " + key + " = " + other});
  }
}

TEST(DeepSpeedKeys, AutoAndNullKeepOurValueAndSaySo) {
  for (const DeepSpeedKey& row : deepspeed_keys()) {
    SCOPED_TRACE(row.key);
    const bool is_needed = row.key == "optimizer.type" || row.key == "scheduler.type";
    if (is_needed || row.effect == DeepSpeedEffect::kRefused) continue;
    for (const char* open : {"auto", "null"})
      EXPECT_TRUE(some_note_has(resolved_with(file_for(row, open)).notes, key_in_a_file(row) + "=" + open));
  }
}

TEST(DeepSpeedKeys, EveryRowIsFoundByItsOwnKeyAndNamesKeysOfOurs) {
  Config config;
  const std::vector<Field> table = fields(config);
  for (const DeepSpeedKey& row : deepspeed_keys()) {
    EXPECT_EQ(find_deepspeed_key(key_in_a_file(row)), &row) << row.key;
    if (row.ours.empty()) continue;
    for (const std::string& key : split(row.ours, ','))
      EXPECT_NE(std::ranges::find(table, key.substr(key.find_first_not_of(' ')), &Field::key), table.end())
          << key;
  }
}

// ---- the batch

TEST(DeepSpeedBatch, AnyTwoOfThreeGiveTheThird) {
  const Keys expected = {{"train.global_batch", "32"}, {"train.rank_batch", "0"}, {"train.micro_batch", "4"}};
  expect_keys(resolved_with(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4})").config,
              expected);
  expect_keys(resolved_with(R"({"train_batch_size": 32, "gradient_accumulation_steps": 4})").config,
              expected);
  expect_keys(resolved_with(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
                                "gradient_accumulation_steps": 4})")
                  .config,
              expected);
  expect_keys(
      resolved_with(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4})").config,
      {{"train.rank_batch", "16"}, {"train.micro_batch", "4"}});
}

TEST(DeepSpeedBatch, OneOfThree) {
  expect_keys(resolved_with(R"({"train_batch_size": 32})", "train: {micro_batch: 2, rank_batch: 2}").config,
              {{"train.global_batch", "32"}, {"train.micro_batch", "0"}, {"train.rank_batch", "0"}});
  expect_keys(resolved_with(R"({"train_micro_batch_size_per_gpu": 4})").config,
              {{"train.rank_batch", "4"}, {"train.micro_batch", "4"}});
  expect_keys(resolved_with(R"({"gradient_accumulation_steps": 4})").config, {{"train.micro_batch", "2"}});
  expect_keys(resolved_with(R"({"train_micro_batch_size_per_gpu": 4, "train_batch_size": "auto"})").config,
              {{"train.global_batch", "16"}, {"train.micro_batch", "4"}, {"train.rank_batch", "0"}});
}

TEST(DeepSpeedBatch, ContradictionsAreRefusedWithTheNumbers) {
  const std::string three = R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,
                                "gradient_accumulation_steps": 4})";
  expect_refusal([&] { resolved_with(three, "", 4); }, {"[plan.deepspeed] ds.json: train_batch_size = 32",
                                                        "per_gpu 4", "steps 4", "x 4 data-parallel ranks"});
  EXPECT_NO_THROW(read_deepspeed(file_of(three, std::nullopt), {})) << "2 ranks would do";
  expect_refusal([&] { resolved_with(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5})"); },
                 {"per_gpu 5", "(any)", "x 2 data-parallel"});
  expect_refusal([&] { resolved_with(R"({"train_batch_size": 32, "gradient_accumulation_steps": 5})"); },
                 {"gradient_accumulation_steps = 5", "32", "2 data-parallel ranks"});
  const auto without_ranks =
      file_of(R"({"train_batch_size": 32, "gradient_accumulation_steps": 4})", std::nullopt);
  expect_refusal([&] { read_deepspeed(without_ranks, {}); }, {"-n"});
  expect_refusal([&] { resolved_with(R"({"train_batch_size": 0})"); },
                 {"train_batch_size = 0", "it must be 1 to"});
}

TEST(DeepSpeedBatch, RanksOfAPipelineShareABatch) {
  const std::string two = R"({"train_batch_size": 32, "gradient_accumulation_steps": 4})";
  expect_keys(resolved_with(two, "parallel: {pp: 2}", 4).config, {{"train.micro_batch", "4"}});
}

// ---- order, origins, errors

TEST(DeepSpeedSource, StandsBetweenTheFileAndTheVariables) {
  const std::string text =
      R"({"gradient_clipping": 0.5, "steps_per_print": 7, "zero_optimization": {"stage": 2}})";
  const ResolvedConfig resolved =
      load({.text = "train: {grad_clip: 2.0, log_every: 3}\nparallel: {policy: ddp}",
            .overrides = {"parallel.policy=zero1"}},
           file_of(text), Environment(Keys{{"TRIREME__TRAIN__LOG_EVERY", "9"}}));
  expect_keys(resolved.config,
              {{"train.grad_clip", "0.5"}, {"train.log_every", "9"}, {"parallel.policy", "zero1"}});
  EXPECT_EQ(resolved.origins.at("train.grad_clip"), "ds.json: gradient_clipping");
  EXPECT_EQ(resolved.origins.at("train.log_every"), "TRIREME__TRAIN__LOG_EVERY");
  EXPECT_EQ(resolved.origins.at("parallel.policy"), "--parallel.policy");
}

TEST(DeepSpeedSource, APolicyTakesTheShardingOfFsdpAway) {
  expect_keys(
      resolved_with(R"({"zero_optimization": {"stage": 2}})", "parallel: {policy: 'fsdp:no_shard'}").config,
      {{"parallel.policy", "zero2"}, {"parallel.sharding", "auto"}});
}

TEST(DeepSpeedSource, ItsYamlMakesTheSameConfig) {
  const std::string text = R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3,
    "optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "nesterov": true}},
    "fp16": {"enabled": true, "loss_scale": 128}, "zero_optimization": {"stage": 3}})";
  const std::string yaml = to_yaml(read_deepspeed(file_of(text), {}));
  EXPECT_TRUE(differing_keys(load({.text = yaml}, Environment()).config, resolved_with(text).config).empty())
      << yaml;
}

TEST(DeepSpeedSource, CommentsAreNoError) {
  expect_keys(resolved_with("{\n // how often\n \"steps_per_print\": 7 /* steps */\n}").config,
              {{"train.log_every", "7"}});
}

TEST(DeepSpeedSource, ErrorsNameThePlaceTheKeyAndTheFix) {
  const std::pair<const char*, std::vector<std::string>> mistakes[] = {
      {"{\n  \"steps_per_print\": 7,,\n}", {"[plan.deepspeed] ds.json:2:24: ", "syntax error"}},
      {"{\"a\": 1", {"ds.json:1:8: ", "syntax error"}},
      {"[1]", {"no JSON object"}},
      {R"({"steps_per_print": 1, "steps_per_print": 2})", {"'steps_per_print' is given twice"}},
      {R"({"zero_optimization": {"stag": 2}})",
       {"zero_optimization.stag = 2: unknown key, did you mean 'zero_optimization.stage'?"}},
      {R"({"nonsense": {}})", {"nonsense = {}: unknown key; correct or remove it"}},
      {R"({"zero_optimization": {"stage": 4}})",
       {"zero_optimization.stage = 4: it must be one of 0, 1, 2, 3"}},
      {R"({"zero_optimization": {"stage": "2"}})", {"stage = 2: this is not a whole number"}},
      {R"({"fp16": {"enabled": 1}})", {"fp16.enabled = 1: this is not true or false"}},
      {R"({"fp16": {"enabled": true}, "bf16": {"enabled": true}})",
       {"bf16.enabled = true: fp16 is enabled as well"}},
      {R"({"fp16": {"initial_scale_power": 32}})", {"initial_scale_power = 32", "2^24"}},
      {R"({"optimizer": {"params": {"lr": 1}}})", {"optimizer: it has no type"}},
      {R"({"optimizer": {"type": "Lamb"}})", {"optimizer.type = Lamb"}},
      {R"({"optimizer": {"type": "AdamW", "params": {"momentum": 0.9}}})",
       {"momentum = 0.9: AdamW has no such parameter"}},
      {R"({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": false}}})",
       {"adam_w_mode = false", "L2"}},
      {R"({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}})",
       {"betas = [0.9]: there must be two"}},
      {R"({"scheduler": {"type": "OneCycle"}})", {"scheduler.type = OneCycle", "WarmupDecayLR"}},
      {R"({"scheduler": {"type": "WarmupDecayLR"}})", {"total_num_steps"}},
      {R"({"scheduler": {"type": "WarmupLR", "params": {"cos_min_ratio": 1}}})",
       {"WarmupLR has no such parameter"}},
      {R"({"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16"}})",
       {"grad_accum_dtype = fp16", "(bf16)"}},
      {R"({"communication_data_type": "int8"})", {"communication_data_type = int8", "fp32, bf16"}},
      {R"({"gradient_clipping": -1})", {"train.grad_clip=-1 (ds.json: gradient_clipping)", "at least 0"}}};
  for (const auto& [text, words] : mistakes) expect_refusal([&] { resolved_with(text); }, words);
  expect_refusal([] { read_deepspeed({.path = "missing.json"}, {}); },
                 {"missing.json: there is no such file"});
}

TEST(DeepSpeedSource, FilesThatNobodyMeansAreRefusedAndNothingElseHappens) {
  std::string deep = "1";
  deep = std::string(100'000, '[') + deep + std::string(100'000, ']');
  expect_refusal([&] { resolved_with("{\"steps_per_print\": " + deep + "}"); }, {"nested more than 16 deep"});
  expect_refusal([] { resolved_with(R"({"train_batch_size": 18446744073709551615})"); }, {"it must be 1 to"});
  expect_refusal([] { resolved_with(R"({"gradient_clipping": 1e999})"); }, {"ds.json: ", "correct the JSON"});
  expect_refusal(
      [] {
        resolved_with(R"({"train_micro_batch_size_per_gpu": 1000000000,
                                         "gradient_accumulation_steps": 1000000000})");
      },
      {"train.rank_batch=1000000000000000000"});
}

TEST(DeepSpeedSource, AValueWithLinesStaysInsideItsComment) {
  const std::string yaml =
      to_yaml(read_deepspeed(file_of(R"({"tensorboard": {"job_name": "a\nseed: 7"}})"), {}));
  EXPECT_EQ(load({.text = yaml}, Environment()).config.seed, Config().seed) << yaml;
}

TEST(DeepSpeedSource, WhatDeepSpeedWouldAssumeIsSet) {
  expect_keys(resolved_with(R"({"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}})").config,
              {{"optim.weight_decay", "0.01"}});

  const ResolvedConfig resolved = resolved_with(R"({"optimizer": {"type": "Adam"}})");
  expect_keys(resolved.config,
              {{"optim.lr", "0.001"}, {"optim.beta2", "0.999"}, {"optim.weight_decay", "0"}});
  EXPECT_EQ(resolved.origins.at("optim.lr"), "ds.json: optimizer.params.lr is left out");
  EXPECT_TRUE(some_note_has(resolved.notes, "gradient_clipping is left out: train.grad_clip=1.0 stays"));
  EXPECT_TRUE(some_note_has(resolved.notes, "scheduler is left out: optim.schedule=cosine stays"));
}

}  // namespace
}  // namespace trireme::plan
