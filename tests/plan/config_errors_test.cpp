// What a wrong config says: key, value, place, the nearest name or what is allowed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/config.h"

namespace trireme::plan {
namespace {

using Variables = std::map<std::string, std::string>;

std::string refusal(const ConfigSources& sources, const Environment& environment = {}) {
  try {
    load(sources, environment);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "accepted";
}

std::string of_text(const std::string& text) {
  return refusal({.text = text});
}
std::string of_overrides(const std::vector<std::string>& overrides) {
  return refusal({.overrides = overrides});
}

TEST(ConfigErrors, UnknownKeysNameLineColumnAndTheNearest) {
  test::expect_mentions(of_text("train:\n  stpes: 3\n"),
                        {"<text>:2:3", "'train.stpes'", "did you mean 'steps'"});
  test::expect_mentions(of_text("name: a\ntrian:\n  steps: 3\n"),
                        {"<text>:2:1", "'trian'", "did you mean 'train'"});
  test::expect_mentions(of_text("nmae: a\n"), {"<text>:1:1", "did you mean 'name'"});
}

TEST(ConfigErrors, KeysInTheWrongSectionAreShownTheirOwn) {
  test::expect_mentions(of_text("train:\n  lr: 3e-4\n"), {"'train.lr'", "did you mean 'optim.lr'"});
  test::expect_mentions(of_text("seq_len: 3\n"), {"'seq_len'", "did you mean 'data.seq_len'"});
  test::expect_mentions(of_overrides({"train.lr=1"}), {"--train.lr", "did you mean 'optim.lr'"});
  test::expect_mentions(of_overrides({"steps=5"}), {"--steps", "did you mean 'train.steps'"});
}

TEST(ConfigErrors, UnknownKeysOfVariablesAndOverridesAreNamed) {
  test::expect_mentions(of_overrides({"train.stepps=5"}), {"--train.stepps", "did you mean 'train.steps'"});
  test::expect_mentions(of_overrides({"optmi.eps=5"}), {"did you mean 'optim.eps'"});
  test::expect_mentions(refusal({}, Environment(Variables{{"TRIREME__TRAIN__STEP", "5"}})),
                        {"TRIREME__TRAIN__STEP", "'train.step'", "did you mean 'train.steps'"});
  test::expect_mentions(refusal({}, Environment(Variables{{"TRIREME__TRAIN_STEPS", "5"}})),
                        {"TRIREME__TRAIN_STEPS", "unknown key"});
  test::expect_mentions(of_overrides({"quite.elsewhere=5"}),
                        {"unknown key 'quite.elsewhere'; correct or remove it"});
}

TEST(ConfigErrors, WrongTypesNameKeyValuePlaceAndType) {
  test::expect_mentions(of_text("train:\n  global_batch: 4\n  steps: many\n"),
                        {"train.steps='many'", "<text>:3:3", "whole number", "1 to 1000000000000"});
  test::expect_mentions(of_overrides({"optim.lr=fast"}), {"optim.lr='fast'", "--optim.lr", "number"});
  test::expect_mentions(of_overrides({"model.tie_embeddings=maybe"}), {"'maybe'", "true or false"});
  test::expect_mentions(refusal({}, Environment(Variables{{"TRIREME__SEED", "x"}})),
                        {"seed='x'", "TRIREME__SEED"});
}

TEST(ConfigErrors, NumbersMustBeWholeFiniteAndInRange) {
  for (const char* value : {"1.5", "1e30", "0x10", "", "nan", "1_000", "+", "++1", "+-1"}) {
    test::expect_mentions(of_overrides({std::string("seed=") + value}), {"seed='", "whole number"});
  }
  for (const char* value : {"9223372036854775808", "99999999999999999999", "-9223372036854775809"}) {
    test::expect_mentions(of_overrides({std::string("seed=") + value}),
                          {std::string("seed=") + value, "out of range", "0 to 1e+18"});
  }
  for (const char* value : {"nan", "inf", "-inf", "1e999", "3e-4x", "+-1e-3"}) {
    test::expect_mentions(of_overrides({std::string("optim.lr=") + value}), {"optim.lr='", "finite number"});
  }
}

TEST(ConfigErrors, ADeadlineThatNobodyLivesToSeeIsRefused) {
  test::expect_mentions(of_overrides({"comm.timeout_s=1e12"}), {"comm.timeout_s", "out of range", "86400"});
}

TEST(ConfigErrors, EveryRangeIsEnforcedAtItsEdge) {
  Config table;
  for (const Field& field : fields(table)) {
    if (field.min) {
      const std::string below = field.key + "=" + fmt::format("{}", *field.min - 1);
      test::expect_mentions(of_overrides({below}),
                            {field.key, "out of range", fmt::format("{}", *field.min)});
    }
    if (field.max) {
      const bool whole = std::holds_alternative<int64_t*>(field.value);
      const auto next = static_cast<int64_t>(std::nextafter(*field.max, 1e300)) + 1;
      const std::string above =
          field.key + "=" + (whole ? fmt::format("{}", next) : fmt::format("{}", *field.max + 1));
      test::expect_mentions(of_overrides({above}),
                            {field.key, "out of range", fmt::format("{}", *field.max)});
    }
  }
}

TEST(ConfigErrors, EveryChoiceIsEnforcedAndListed) {
  Config table;
  for (const Field& field : fields(table)) {
    if (field.choices.empty()) continue;
    const std::string message = of_overrides({field.key + "=nosuchword"});
    test::expect_mentions(message, {field.key + "='nosuchword'", "choose one of"});
    test::expect_mentions(message, field.choices);
  }
}

TEST(ConfigErrors, WordsOfOthersSuggestOurs) {
  test::expect_mentions(of_overrides({"precision.compute=bfloat16"}), {"did you mean 'bf16'?"});
  test::expect_mentions(of_overrides({"precision.compute=Float16"}), {"did you mean 'fp16'?"});
  test::expect_mentions(of_overrides({"precision.compute=half"}), {"did you mean 'fp16'?"});
  test::expect_mentions(of_overrides({"parallel.policy=FSDP"}), {"did you mean 'fsdp'?"});
  test::expect_mentions(of_overrides({"data.kind=cifar-10"}), {"did you mean 'images'?"});
  EXPECT_EQ(of_overrides({"optim.schedule=bfloat16"}).find("did you mean"), std::string::npos);
}

TEST(ConfigErrors, WrongChoiceSuggestsTheNearest) {
  test::expect_mentions(of_text("parallel:\n  policy: zero\n"), {"<text>:2:3", "did you mean 'zero1'"});
  test::expect_mentions(of_overrides({"model.preset=gpt-tny"}), {"did you mean 'gpt-tiny'"});
}

TEST(ConfigErrors, DuplicateKeysAreRefused) {
  test::expect_mentions(of_text("train:\n  steps: 3\n  steps: 4\n"),
                        {"<text>:3:3", "'train.steps'", "twice"});
  test::expect_mentions(of_text("seed: 3\ntrain: {}\nseed: 3\n"), {"<text>:3:1", "'seed'", "twice"});
  test::expect_mentions(of_text("train: {steps: 1}\ntrain: {log_every: 1}\n"),
                        {"<text>:2:1", "'train'", "twice"});
}

TEST(ConfigErrors, DottedKeysAreShownHowToNest) {
  test::expect_mentions(of_text("train.steps: 3\n"), {"<text>:1:1", "'train.steps'", "'train:'", "'steps:'"});
}

TEST(ConfigErrors, ShapesThatAreNoConfigAreRefused) {
  test::expect_mentions(of_text("- a\n- b\n"), {"<text>:1:1", "mapping"});
  test::expect_mentions(of_text("just words\n"), {"mapping"});
  test::expect_mentions(of_text("train: 3\n"), {"<text>:1:1", "'train' is a section"});
  test::expect_mentions(of_text("train:\n  - 3\n"), {"'train' is a section"});
  test::expect_mentions(of_text("train:\n  steps: [1, 2]\n"), {"<text>:2:3", "'train.steps' has a list"});
  test::expect_mentions(of_text("train:\n  steps: {a: 1}\n"), {"'train.steps' has keys below it"});
  test::expect_mentions(of_text("train:\n  steps:\n"), {"<text>:2:3", "'train.steps' has no value"});
  test::expect_mentions(of_text("seed: 1\n---\nseed: 2\n"), {"more than one YAML document"});
  test::expect_mentions(of_text("? [a, b]\n: 1\n"), {"a key must be a plain word"});
}

TEST(ConfigErrors, MalformedYamlNamesLineAndColumn) {
  test::expect_mentions(of_text("train:\n  steps: [1, 2\n"), {"<text>:", "not valid YAML"});
  test::expect_mentions(of_text("name: \"open\n"), {"<text>:", "not valid YAML"});
  test::expect_mentions(of_text("name: *nowhere\n"), {"<text>:1:", "not valid YAML"});
}

TEST(ConfigErrors, AMergeKeyIsCalledOne) {
  test::expect_mentions(of_text("base: &b\ntrain:\n  <<: *b\n"), {"<text>:1:1"});
  test::expect_mentions(of_text("train:\n  <<: {steps: 3}\n"), {"<text>:2:3", "merge keys"});
}

TEST(ConfigErrors, ATabIsCalledATab) {
  for (const char* text : {"name: a\n\tseed: 1\n", "train:\n\tsteps: 3\n", "train:\n \tsteps: 3\n",
                           "# first\ntrain:\n  steps: 3\n\tval_every: 4\n"}) {
    const std::string message = of_text(text);
    test::expect_mentions(message, {"indented with a tab", "use spaces"});
    const size_t line = std::string(text).starts_with("#") ? 4 : 2;
    test::expect_mentions(message, {fmt::format("<text>:{}: ", line)});
  }
  EXPECT_EQ(of_text("train:\n  steps:\t3\t# a tab here is fine\n\t# and here\n"), "accepted");
}

TEST(ConfigErrors, QuotesLeftOpenAreRefusedAndSwallowNothing) {
  for (const std::string end : {"", "\n", "\n\n", "\r\n", "\n  \n"}) {
    test::expect_mentions(of_text("name: 'open\nseed: 3" + end), {"not valid YAML"});
    test::expect_mentions(of_text("train:\n  sample_prompt: \"x\n  steps: 3\noptim:\n  lr: 1" + end),
                          {"not valid YAML"});
  }
}

TEST(ConfigErrors, AbsentFileIsNamed) {
  test::expect_mentions(refusal({.path = "/absent/run.yaml"}), {"'/absent/run.yaml'", "no config file"});
  EXPECT_EQ(refusal({.path = "/absent/run.yaml"}).find("--model.preset"), std::string::npos);
}

TEST(ConfigErrors, PresetNameGivenAsFileIsShownTheFlag) {
  test::expect_mentions(refusal({.path = "gpt2-124m"}), {"'gpt2-124m'", "--model.preset=gpt2-124m"});
  test::expect_mentions(refusal({.path = "presets/llama-tiny.yaml"}), {"--model.preset=llama-tiny"});
}

TEST(ConfigErrors, FolderGivenAsFileIsRefused) {
  test::expect_mentions(refusal({.path = std::filesystem::temp_directory_path().string()}), {"is a folder"});
}

TEST(ConfigErrors, OverridesNeedKeyAndValue) {
  test::expect_mentions(of_overrides({"train.steps"}), {"--train.steps", "has no value"});
  test::expect_mentions(of_overrides({"=5"}), {"has no key"});
}

TEST(ConfigErrors, HeadsMustDivide) {
  test::expect_mentions(of_overrides({"model.d_model=130"}),
                        {"model.d_model=130 (--model.d_model)", "model.n_heads=4 (default)", "132"});
  test::expect_mentions(of_overrides({"model.family=llama", "model.n_kv_heads=3"}),
                        {"model.n_kv_heads=3", "divisor of 4"});
  test::expect_mentions(of_overrides({"model.n_kv_heads=2"}), {"model.n_kv_heads=2", "gpt2"});
  test::expect_mentions(of_overrides({"model.head_dim=64"}),
                        {"model.head_dim=64", "256", "model.d_model=128"});
  test::expect_mentions(of_overrides({"model.family=llama", "model.head_dim=5"}),
                        {"model.head_dim=5", "odd"});
  test::expect_mentions(of_overrides({"model.family=llama", "model.d_model=12"}), {"= 3 is odd"});
  EXPECT_EQ(of_overrides({"model.d_model=12"}), "accepted");  // gpt2 turns no pairs
}

TEST(ConfigErrors, RulesBetweenKeysNameBothValues) {
  test::expect_mentions(of_overrides({"model.vocab_size=255"}), {"model.vocab_size=255", "256"});
  EXPECT_EQ(of_overrides({"model.vocab_size=256"}), "accepted");
  test::expect_mentions(of_overrides({"model.max_seq_len=64"}),
                        {"model.max_seq_len=64", "data.seq_len=128 (default)"});
  EXPECT_EQ(of_overrides({"model.max_seq_len=64", "model.family=llama"}), "accepted");
  test::expect_mentions(of_overrides({"optim.min_lr=0.1"}), {"optim.min_lr=0.1", "optim.lr=0.0003"});
  test::expect_mentions(of_overrides({"optim.warmup_steps=101"}),
                        {"optim.warmup_steps=101", "is above train.steps=100",
                         "set optim.warmup_steps=100 or less, or train.steps=101 or more"});
  EXPECT_EQ(of_overrides({"optim.warmup_steps=100"}), "accepted");
  test::expect_mentions(of_overrides({"checkpoint.best=true", "train.val_batches=0"}),
                        {"checkpoint.best=true", "train.val_batches=0"});
}

TEST(ConfigErrors, EarlyStopNeedsValidationsInTheCourseOfTheRun) {
  const std::vector<std::string> on = {"train.early_stop=2", "train.val_every=10"};
  const auto with = [&on](const std::string& more) {
    std::vector<std::string> words = on;
    words.push_back(more);
    return of_overrides(words);
  };
  EXPECT_EQ(of_overrides(on), "accepted");
  EXPECT_EQ(with("train.early_stop_min_delta=0.01"), "accepted");
  EXPECT_EQ(of_overrides({"train.early_stop=2", "train.epochs=3"}), "accepted");
  test::expect_mentions(of_overrides({"train.early_stop=2"}), {"train.early_stop=2", "set train.val_every"});
  EXPECT_EQ(with("train.monitor=accuracy"), "accepted");
  EXPECT_EQ(of_overrides({"data.path=program", "model.vocab_size=13"}), "accepted")
      << "its tokens are no bytes";
  EXPECT_EQ(of_overrides({"train.monitor=loss", "checkpoint.best=true"}), "accepted");
  test::expect_mentions(of_overrides({"train.monitor=loss"}), {"train.monitor=loss", "checkpoint.best"});
  test::expect_mentions(with("train.val_batches=0"), {"train.early_stop=2", "train.val_batches=0"});
  test::expect_mentions(with("data.val_fraction=0"), {"train.early_stop=2", "data.val_fraction"});
  test::expect_mentions(of_overrides({"train.early_stop_min_delta=0.1"}),
                        {"train.early_stop_min_delta=0.1", "no effect without train.early_stop"});
  test::expect_mentions(with("train.early_stop_min_delta=-1"), {"train.early_stop_min_delta"});
}

TEST(ConfigErrors, KeysOfConversationsNeedConversations) {
  EXPECT_EQ(of_overrides({"data.format=chat", "data.path=a.jsonl", "data.chat_template=b.jinja"}),
            "accepted");
  test::expect_mentions(of_overrides({"data.chat_template=b.jinja"}),
                        {"data.chat_template=b.jinja", "data.format=chat"});
  test::expect_mentions(of_overrides({"data.loss_on=all"}),
                        {"data.loss_on=all", "data.format=chat or answers"});
  test::expect_mentions(of_overrides({"data.format=talk"}), {"data.format", "text", "answers", "chat"});
}

TEST(ConfigErrors, DocumentsAreKeptApartWhereAttentionKnowsThem) {
  EXPECT_EQ(of_overrides({"data.reset_attention=true"}), "accepted");
  EXPECT_EQ(of_overrides({"data.reset_attention=true", "data.format=chat", "data.path=a.jsonl"}), "accepted");
  EXPECT_EQ(of_overrides({"data.reset_attention=true", "parallel.cp=2"}), "accepted");
  EXPECT_EQ(of_overrides({"data.reset_attention=true", "parallel.cp=2", "parallel.cp_kind=ulysses"}),
            "accepted");
  test::expect_mentions(
      of_overrides({"data.reset_attention=true", "parallel.cp=2", "parallel.cp_kind=ring"}),
      {"data.reset_attention=true", "parallel.cp_kind=ring", "set parallel.cp_kind=ulysses"});
  test::expect_mentions(of_overrides({"data.reset_attention=true", "model.family=mlp"}),
                        {"data.reset_attention=true", "model.family=mlp", "no attention", "remove it"});
  test::expect_mentions(of_overrides({"data.reset_attention=true", "model.family=resnet"}),
                        {"data.reset_attention=true", "text models"});
  test::expect_mentions(of_overrides({"data.reset_attention=true", "parallel.cp=3", "data.seq_len=96"}),
                        {"parallel.cp=3", "cannot share 4 heads", "knows no ring attention"});
}

TEST(ConfigErrors, EagerAttentionNeedsAllTokensAndKeepsItsScores) {
  EXPECT_EQ(of_overrides({"model.attention=eager"}), "accepted");
  EXPECT_EQ(of_overrides({"model.attention=eager", "model.dropout=0.1", "memory.recompute=block"}),
            "accepted");
  for (const char* other :
       {"parallel.cp=2", "data.reset_attention=true", "memory.recompute=all_but_attention"})
    test::expect_mentions(of_overrides({"model.attention=eager", other}),
                          {"model.attention=eager", other, "set model.attention=auto"});
  test::expect_mentions(of_overrides({"model.attention=eager", "model.family=mlp"}),
                        {"model.attention=eager", "model.family=mlp", "no attention", "remove it"});
  test::expect_mentions(of_overrides({"model.attention=eager", "model.family=resnet"}),
                        {"model.attention=eager", "text models"});
}

TEST(ConfigErrors, DropoutIsForGpt2AndBelowOne) {
  EXPECT_EQ(of_overrides({"model.dropout=0.1"}), "accepted");
  test::expect_mentions(of_overrides({"model.dropout=0.1", "model.family=llama"}),
                        {"model.dropout=0.1", "gpt2"});
  for (const char* key : {"model.dropout", "optim.beta1", "optim.beta2", "optim.momentum", "optim.ema"}) {
    test::expect_mentions(of_overrides({std::string(key) + "=1"}), {key, "below 1"});
  }
}

TEST(ConfigErrors, ProductsInPiecesAreThoseOfCutLayers) {
  EXPECT_EQ(of_overrides({"parallel.tp=2", "parallel.async_tp=true"}), "accepted");
  test::expect_mentions(of_overrides({"parallel.async_tp=true"}),
                        {"parallel.async_tp=true", "parallel.tp=1", "set parallel.tp, or remove it"});
  test::expect_mentions(of_overrides({"parallel.tp=2", "parallel.async_tp=true", "parallel.overlap=false"}),
                        {"parallel.async_tp=true", "parallel.overlap=false", "remove one"});
  test::expect_mentions(of_overrides({"parallel.tp=2", "parallel.async_tp=true", "precision.compute=bf16",
                                      "precision.fp8=tensorwise", "precision.fp8_fallback=emulate"}),
                        {"parallel.async_tp=true", "precision.fp8=tensorwise", "remove one"});
}

TEST(ConfigErrors, AxesThatCannotBeCutAreRefused) {
  test::expect_mentions(of_overrides({"parallel.cp=3"}), {"parallel.cp=3", "use a divisor of the heads"});
  test::expect_mentions(of_overrides({"parallel.cp=3"}),
                        {"ring attention with data.seq_len a multiple of 6"});
  test::expect_mentions(of_overrides({"parallel.tp=2", "parallel.cp=4", "parallel.cp_kind=ulysses"}),
                        {"2 heads", "parallel.tp=2", "use a divisor of the heads", "parallel.cp_kind=ring"});
  EXPECT_EQ(of_overrides({"parallel.tp=2", "parallel.cp=4"}), "accepted");
  EXPECT_EQ(of_overrides({"parallel.cp=3", "data.seq_len=96"}), "accepted");
  test::expect_mentions(of_overrides({"parallel.cp=2", "parallel.cp_kind=ring", "data.seq_len=66"}),
                        {"two pieces for each rank", "data.seq_len a multiple of 4"});
  test::expect_mentions(of_overrides({"parallel.cp_kind=rings"}), {"parallel.cp_kind", "ring"});
  test::expect_mentions(of_overrides({"parallel.cp=2", "model.dropout=0.1"}),
                        {"parallel.cp=2", "set model.dropout to 0"});
  test::expect_mentions(of_overrides({"parallel.cp=4", "data.seq_len=34"}), {"data.seq_len a multiple of 4"});
  EXPECT_EQ(of_overrides({"parallel.cp=2"}), "accepted");
  test::expect_mentions(of_overrides({"parallel.tp=3"}), {"parallel.tp=3", "can be shared by 1, 2, 4 ranks"});
  test::expect_mentions(of_overrides({"parallel.tp=0"}), {"parallel.tp=0"});
  test::expect_mentions(of_overrides({"parallel.tp=2", "data.seq_len=33"}),
                        {"does not divide data.seq_len=33", "a multiple of it"});
  EXPECT_EQ(of_overrides({"parallel.tp=2"}), "accepted");
  EXPECT_EQ(of_overrides({"parallel.dp_shard=2", "parallel.dp_replicate=2"}), "accepted");
}

TEST(ConfigErrors, WhatDoesNotGoWithPipelinesIsRefused) {
  const auto with_pp = [](std::vector<std::string> overrides) {
    overrides.emplace_back("parallel.pp=2");
    return of_overrides(overrides);
  };
  EXPECT_EQ(with_pp({}), "accepted");
  test::expect_mentions(
      with_pp({"parallel.bucket_mib=25", "parallel.policy=ddp"}),
      {"parallel.bucket_mib=25", "parallel.pp=2 (--parallel.pp)", "set parallel.bucket_mib to 0"});
  test::expect_mentions(with_pp({"parallel.reduce_when=every_micro_batch"}),
                        {"parallel.reduce_when=every_micro_batch", "to once"});
  test::expect_mentions(with_pp({"pipeline.chunks=3"}),
                        {"pipeline.chunks=3", "pipeline.schedule=1f1b", "remove it"});
  EXPECT_EQ(with_pp({"pipeline.chunks=3", "pipeline.schedule=interleaved_zb"}), "accepted");
  test::expect_mentions(with_pp({"pipeline.split=3,3"}), {"pipeline.split=3,3", "model.n_layers=4"});
  EXPECT_EQ(with_pp({"pipeline.split=3,1"}), "accepted");
  test::expect_mentions(with_pp({"pipeline.split=3,x"}),
                        {"pipeline.split", "cost, even, or the number of blocks"});
  test::expect_mentions(with_pp({"pipeline.schedule=zbv"}), {"pipeline.schedule", "zb_v"});
  test::expect_mentions(of_overrides({"parallel.schedule=zb_v"}),
                        {"'parallel.schedule'", "pipeline.schedule"});
}

TEST(ConfigErrors, WhatDoesNotGoWithASpreadHeadIsRefused) {
  const auto spread = [](std::vector<std::string> overrides) {
    overrides.insert(overrides.end(), {"parallel.pp=2", "pipeline.spread_head=true"});
    return of_overrides(overrides);
  };
  for (const char* tied : {"model.tie_embeddings=true", "model.tie_embeddings=false"})
    EXPECT_EQ(spread({tied}), "accepted");
  EXPECT_EQ(spread({"parallel.comm_hook=fp16"}), "accepted");
  test::expect_mentions(spread({"pipeline.schedule=dualpipe"}),
                        {"pipeline.schedule=dualpipe", "two ranks", "dualpipe_v"});
  test::expect_mentions(spread({"pipeline.file=mine.csv", "pipeline.placement=two_ways"}),
                        {"pipeline.placement=two_ways"});
  for (const char* hook : {"int8", "topk", "powersgd", "local_sgd"}) {
    test::expect_mentions(spread({fmt::format("parallel.comm_hook={}", hook), "parallel.policy=ddp"}),
                          {"parallel.comm_hook", "none or fp16"});
  }
  test::expect_mentions(
      spread({"precision.fp8=tensorwise", "precision.fp8_head=true", "precision.compute=bf16"}),
      {"precision.fp8_head=true", "pipeline.spread_head"});
}

TEST(ConfigErrors, RecomputationAndLossScalingMustFit) {
  test::expect_mentions(of_overrides({"memory.recompute=cheap", "model.family=mlp"}),
                        {"memory.recompute=cheap", "mlp"});
  EXPECT_EQ(of_overrides({"memory.recompute=block", "model.family=mlp"}), "accepted");
  for (const char* hook : {"int8", "topk", "powersgd"}) {
    const std::string key = std::string("parallel.comm_hook=") + hook;
    test::expect_mentions(of_overrides({key, "precision.compute=fp16"}), {key, "overflow"});
    test::expect_mentions(of_overrides({key, "precision.scaling=dynamic"}), {key, "overflow"});
    EXPECT_EQ(of_overrides({key, "precision.compute=fp16", "precision.scaling=none"}), "accepted");
  }
  test::expect_mentions(of_overrides({"precision.min_scale=8", "precision.initial_scale=4"}),
                        {"precision.min_scale=8", "precision.initial_scale=4"});
}

TEST(ConfigErrors, DeterministicIsRefusedWhereTheBackendChoosesTheOrderOfSums) {
  for (const char* other : {"comm.reduction=backend", "parallel.comm_hook=powersgd"}) {
    test::expect_mentions(of_overrides({"train.deterministic=true", other}),
                          {"train.deterministic=true", other});
    EXPECT_EQ(of_overrides({other}), "accepted");
  }
  EXPECT_EQ(of_overrides({"train.deterministic=true", "parallel.comm_hook=int8"}), "accepted");
}

TEST(ConfigErrors, ReshardingNeedsAWordOrANumberOfRanks) {
  for (const char* wrong : {"0", "yes", "-1", "2x", "", "1.5"}) {
    test::expect_mentions(of_overrides({std::string("parallel.reshard_after_forward=") + wrong}),
                          {std::string("parallel.reshard_after_forward='") + wrong + "'",
                           "--parallel.reshard", "auto, true, false, or a number of ranks"});
  }
}

TEST(ConfigErrors, KeysOfAnotherOptimizerAreRefusedUnlessTheyChangeNothing) {
  test::expect_mentions(
      of_overrides({"optim.momentum=0.5"}),
      {"optim.momentum=0.5 (--optim.momentum)", "optim.name=sgd", "optim.name=adamw (default)"});
  for (const char* key : {"optim.beta1=0.8", "optim.beta2=0.99", "optim.eps=0.001"}) {
    test::expect_mentions(of_overrides({"optim.name=sgd", key}), {key, "is for optim.name=adamw"});
    EXPECT_EQ(of_overrides({key}), "accepted");
  }
  EXPECT_EQ(of_overrides({"optim.name=sgd", "optim.momentum=0.5"}), "accepted");
  EXPECT_EQ(of_overrides({"optim.name=sgd", "optim.beta1=0.9"}), "accepted");
}

TEST(ConfigErrors, KeysOfTheStepsScheduleAreRefusedWithAnother) {
  for (const char* key : {"optim.step_every=5", "optim.step_factor=0.5"}) {
    test::expect_mentions(of_overrides({key}),
                          {key, "optim.schedule=steps", "optim.schedule=cosine (default)"});
    EXPECT_EQ(of_overrides({key, "optim.schedule=steps"}), "accepted");
  }
  EXPECT_EQ(of_overrides({"optim.step_factor=0.1"}), "accepted");
}

TEST(ConfigErrors, ARangeOfRatesBeginsAboveZeroWithItsFirstStep) {
  test::expect_mentions(of_overrides({"optim.schedule=range"}),
                        {"optim.schedule=range", "optim.min_lr=0 (default)", "above 0"});
  test::expect_mentions(of_overrides({"optim.schedule=range", "optim.min_lr=1e-7", "optim.warmup_steps=3"}),
                        {"optim.schedule=range", "optim.warmup_steps=3", "set it to 0"});
  EXPECT_EQ(of_overrides({"optim.schedule=range", "optim.min_lr=1e-7", "optim.lr=1"}), "accepted");
}

TEST(ConfigErrors, NesterovNeedsMomentumAndSgd) {
  EXPECT_EQ(of_overrides({"optim.name=sgd", "optim.nesterov=true"}), "accepted");
  test::expect_mentions(of_overrides({"optim.nesterov=true"}),
                        {"optim.nesterov=true", "is for optim.name=sgd"});
  test::expect_mentions(of_overrides({"optim.name=sgd", "optim.nesterov=true", "optim.momentum=0"}),
                        {"optim.nesterov=true", "optim.momentum=0"});
}

TEST(ConfigErrors, RunNameMustNameADirectory) {
  test::expect_mentions(of_overrides({"name="}), {"name= (--name)", "directory"});
  test::expect_mentions(of_overrides({"name=a/b"}), {"name=a/b"});
}

/// yaml-cpp finds null documents without end in some of these.
TEST(ConfigErrors, TextsOfWhichYamlTakesNothingAreRefused) {
  for (const char* text : {",", ", ", ",\n", "a: 1\n,", "},", "]", "}", "seed: 1\n}", "[1],[2]", ",,,"}) {
    EXPECT_TRUE(of_text(text).starts_with("[plan.config]")) << text << ": " << of_text(text);
  }
}

TEST(ConfigErrors, AFileThatIsTooLongIsNamedAndNotRead) {
  test::expect_mentions(refusal({.path = "/dev/zero"}), {"/dev/zero", "more than 1048576 bytes"});
  const std::filesystem::path path = std::filesystem::temp_directory_path() / "trireme-long-config.yaml";
  const auto of_size = [&](size_t size) {
    std::string text = "seed: 7\n# ";
    text.resize(size, '.');
    std::ofstream(path) << text;
    return refusal({.path = path.string()});
  };
  EXPECT_EQ(of_size(1 << 20), "accepted");
  test::expect_mentions(of_size((1 << 20) + 1), {path.string(), "more than 1048576 bytes"});
  std::filesystem::remove(path);
}

TEST(ConfigErrors, BucketsNeedParametersThatStayWhole) {
  const auto with = [](const std::string& policy, const std::string& sharding) {
    return of_overrides(
        {"parallel.bucket_mib=1", "parallel.policy=" + policy, "parallel.sharding=" + sharding});
  };
  for (const char* policy : {"ddp", "zero1", "zero2"}) EXPECT_EQ(with(policy, "auto"), "accepted") << policy;
  EXPECT_EQ(with("fsdp", "no_shard"), "accepted");
  for (const char* sharding : {"auto", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"}) {
    test::expect_mentions(with("fsdp", sharding), {"parallel.bucket_mib=1", "parallel.policy=fsdp", "zero2"});
  }
  test::expect_mentions(with("zero3", "auto"), {"parallel.policy=zero3"});
  EXPECT_EQ(of_overrides({"parallel.bucket_mib=0", "parallel.policy=fsdp"}), "accepted");
}

TEST(ConfigErrors, HooksArePairedWithPoliciesThatTheEngineRunsThemUnder) {
  const auto with = [](const std::string& hook, const std::string& policy, int64_t replicas) {
    return of_overrides({"parallel.comm_hook=" + hook, "parallel.policy=" + policy,
                         fmt::format("parallel.dp_replicate={}", replicas)});
  };
  for (const char* hook : {"fp16", "int8", "topk", "powersgd"}) {
    for (const char* policy : {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp:no_shard"})
      EXPECT_EQ(with(hook, policy, 1), "accepted") << hook << " with " << policy;
    for (const char* policy : {"fsdp:hybrid_shard", "fsdp:hybrid_shard_zero2", "fsdp"}) {
      test::expect_mentions(
          with(hook, policy, 2),
          {fmt::format("parallel.comm_hook={} (--parallel.comm_hook)", hook),
           "cannot be combined with parallel.policy=fsdp:hybrid_shard", "use a policy without replicas"});
    }
    EXPECT_EQ(with(hook, "ddp", 2), "accepted") << hook;
  }
  for (const char* policy : {"ddp", "fsdp:no_shard"}) {
    for (const int64_t replicas : {1, 2})
      EXPECT_EQ(with("local_sgd", policy, replicas), "accepted") << policy;
  }
  for (const char* policy : {"zero1", "zero2", "zero3", "fsdp", "fsdp:shard_grad_op", "fsdp:hybrid_shard"}) {
    test::expect_mentions(with("local_sgd", policy, 2),
                          {"parallel.comm_hook=local_sgd", "each rank trains alone", "use ddp"});
  }
  EXPECT_EQ(with("none", "fsdp:hybrid_shard", 2), "accepted");
}

TEST(ConfigErrors, CheckpointsOfLocalSgdAreSavedWhereRanksHaveAveraged) {
  const std::string local = "parallel.comm_hook=local_sgd", ddp = "parallel.policy=ddp";
  test::expect_mentions(
      of_overrides({"checkpoint.every=12", "parallel.local_steps=8", local}),
      {"checkpoint.every=12", "parallel.local_steps=8", local, "set checkpoint.every to 16"});
  test::expect_mentions(of_overrides({"checkpoint.every=16", "precision.compute=fp16", local}),
                        {"checkpoint.every=16", local, "loss scaling", "bf16"});
  EXPECT_EQ(of_overrides({"checkpoint.every=16", "parallel.local_steps=8", local, ddp}), "accepted");
  EXPECT_EQ(of_overrides({"checkpoint.every=0", "parallel.local_steps=7", local, ddp}), "accepted");
  for (const char* hook : {"none", "fp16", "int8", "topk", "powersgd"})
    EXPECT_EQ(of_overrides({"checkpoint.every=5", std::string("parallel.comm_hook=") + hook}), "accepted");
  const auto best = [&](std::vector<std::string> overrides) {
    for (const char* more : {"checkpoint.best=true", "train.val_batches=1", "parallel.local_steps=8"})
      overrides.emplace_back(more);
    overrides.insert(overrides.end(), {local, ddp});
    return of_overrides(overrides);
  };
  test::expect_mentions(best({"train.val_every=12"}), {"train.val_every=12", "set train.val_every to 16"});
  test::expect_mentions(best({"train.val_every=0"}), {"checkpoint.best=true", "multiple of parallel.local"});
  test::expect_mentions(best({"train.val_every=16", "optim.ema=0.9"}), {"optim.ema=0.9", local});
  EXPECT_EQ(best({"train.val_every=16"}), "accepted");
}

TEST(ConfigErrors, ATextThatNothingBeginsIsRefused) {
  test::expect_mentions(of_overrides({"train.sample_tokens=4", "train.sample_prompt="}),
                        {"train.sample_tokens=4", "train.sample_prompt=\"\""});
  EXPECT_EQ(of_overrides({"train.sample_prompt="}), "accepted");
}

TEST(ConfigErrors, CountsWhoseProductsWouldOverflowAreRefused) {
  test::expect_mentions(of_overrides({"train.val_batches=9000000000000000000"}),
                        {"train.val_batches", "out of range"});
  test::expect_mentions(of_overrides({"train.steps=9000000000000000000"}), {"train.steps", "out of range"});
  const std::string both = "parallel.dp_replicate=4294967296";
  test::expect_mentions(of_overrides({"parallel.pp=4294967296", both}), {"parallel.", "out of range"});
  test::expect_mentions(of_overrides({"train.micro_batch=4611686018427387904"}),
                        {"train.micro_batch", "out of range"});
  test::expect_mentions(of_overrides({"memory.loss_chunk_mib=17592186044416"}),
                        {"memory.loss_chunk_mib", "out of range"});
  test::expect_mentions(of_overrides({"parallel.policy=ddp", "parallel.bucket_mib=1e14"}),
                        {"parallel.bucket_mib", "out of range"});
  test::expect_mentions(of_overrides({"parallel.reshard_after_forward=9223372036854775807"}),
                        {"parallel.reshard_after_forward", "number of ranks up to 1000000"});
  test::expect_mentions(
      of_overrides({"pipeline.split=9223372036854775807,9223372036854775807,6", "parallel.pp=3"}),
      {"pipeline.split", "(up to 10000)"});
}

}  // namespace
}  // namespace trireme::plan
