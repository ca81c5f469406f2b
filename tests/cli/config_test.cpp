// Configs through the front command: where values come from, and what is refused before anything starts.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/cli/front_process.h"

namespace trireme::cli {
namespace {

/// The resolved config, as `config show --json` prints it.
nlohmann::json resolved(const FrontProcess& front, const Words& arguments) {
  Words words = {"config", "show", "--json"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const Outcome outcome = front.run(words);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  return outcome.json()["config"];
}

TEST(ConfigShow, TakesEveryFormOfOverride) {
  const FrontProcess front;
  EXPECT_EQ(resolved(front, {"--train.steps=7"})["train"]["steps"], 7);
  EXPECT_EQ(resolved(front, {"--train.steps", "7"})["train"]["steps"], 7);
  EXPECT_EQ(resolved(front, {"--name=x", "--seed", "5"})["seed"], 5);
  EXPECT_EQ(resolved(front, {"--data.path=a=b"})["data"]["path"], "a=b");
  EXPECT_EQ(resolved(front, {"--train.sample_prompt", "-x"})["train"]["sample_prompt"], "-x");
  EXPECT_EQ(resolved(front, {"--model.tie_embeddings=false"})["model"]["tie_embeddings"], false);
  EXPECT_EQ(resolved(front, {"--model.tie_embeddings", "false"})["model"]["tie_embeddings"], false);
  EXPECT_EQ(resolved(front, {"--model.tie_embeddings", "--train.steps=7"})["model"]["tie_embeddings"], true);
}

TEST(ConfigShow, TheVocabularyFollowsTheTokenizerUnlessItIsGiven) {
  const FrontProcess front;
  std::filesystem::copy_file(TRIREME_TEXT_FIXTURES "/llama2.json", front.file("llama2.json"));
  const auto shown = resolved(front, {"--origin", "--data.tokenizer=llama2.json"});
  EXPECT_EQ(shown["model"]["vocab_size"]["value"], 636);
  EXPECT_EQ(shown["model"]["vocab_size"]["origin"], "derived: data.tokenizer");
  const std::string path = shown["data"]["tokenizer"]["value"];
  EXPECT_TRUE(std::filesystem::path(path).is_absolute()) << path;
  EXPECT_TRUE(std::filesystem::equivalent(path, front.file("llama2.json")));
  EXPECT_EQ(
      resolved(front, {"--data.tokenizer=llama2.json", "--model.vocab_size=640"})["model"]["vocab_size"],
      640);
  EXPECT_EQ(resolved(front, {})["model"]["vocab_size"], 256);
  // A preset's is enlarged where the tokens need it, with a note.
  const auto with_preset = [&](const char* preset) {
    return front.run({"config", "show", "--json", "--data.tokenizer=llama2.json",
                      std::string("--model.preset=") + preset});
  };
  const Outcome tiny = with_preset("gpt-tiny");
  EXPECT_EQ(tiny.json()["config"]["model"]["vocab_size"], 636);
  EXPECT_TRUE(contains(tiny.err, "becomes 636")) << tiny.err;
  EXPECT_EQ(with_preset("gpt2-124m").json()["config"]["model"]["vocab_size"], 50257);
}

TEST(ConfigShow, NeedsNoDataAndNoTokenizerThatIsNotThere) {
  const FrontProcess front;
  std::filesystem::create_directories(front.file("models"));
  std::filesystem::copy_file(TRIREME_TEXT_FIXTURES "/llama2.json", front.file("models/llama2.json"));
  write_file_atomic(front.file("models/c.yaml"), "data: {path: none.txt, tokenizer: llama2.json}\n");
  const Outcome shown = front.run({"config", "show", "models/c.yaml", "--json"});
  ASSERT_EQ(shown.code, 0) << shown.err;
  const auto data = shown.json()["config"]["data"];
  EXPECT_EQ(data["path"], "none.txt");
  EXPECT_TRUE(data["tokenizer"].get<std::string>().ends_with("/llama2.json")) << data;
  EXPECT_EQ(shown.json()["config"]["model"]["vocab_size"], 256);
  EXPECT_TRUE(contains(shown.err, "does not exist; did you mean ")) << shown.err;
  EXPECT_TRUE(contains(shown.err, "models/llama2.json, beside the config file?")) << shown.err;
  const Outcome trained = front.run(
      {"train", "models/c.yaml", "--data.path=models/c.yaml", "--device=cpu", "-n", "1", "--dry-run"});
  EXPECT_EQ(trained.code, 2);
  EXPECT_TRUE(contains(trained.err, "models/llama2.json, beside the config file?")) << trained.err;
}

TEST(ConfigShow, RefusesTokenizersThatAreEmptyOrTooLarge) {
  const FrontProcess front;
  std::filesystem::create_directories(front.file("models"));
  std::filesystem::copy_file(TRIREME_TEXT_FIXTURES "/llama2.json", front.file("models/llama2.json"));
  const auto refusal = [&](Words words) {
    words.insert(words.begin(), {"config", "show"});
    const Outcome outcome = front.run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    return outcome.err;
  };
  EXPECT_TRUE(contains(refusal({"--data.tokenizer="}), "data.tokenizer is empty"));
  const std::string message = refusal({"--data.tokenizer=models/llama2.json", "--model.vocab_size=300"});
  EXPECT_TRUE(contains(message, "set model.vocab_size to 636 or more")) << message;
}

TEST(ConfigShow, TakesTheKeysOfOtherTrainers) {
  const FrontProcess front;
  for (const Words& words : {Words{"--strategy=ddp"}, Words{"--strategy", "ddp"}})
    EXPECT_EQ(resolved(front, words)["parallel"]["policy"], "ddp");
  EXPECT_EQ(resolved(front, {"--training.log_interval=7"})["train"]["log_every"], 7);
  const Outcome bad = front.run({"config", "show", "--strategy=none-such"});
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(contains(bad.err, "--strategy")) << bad.err;
}

TEST(ConfigShow, AnOverrideDoesNotSwallowTheConfigFile) {
  const FrontProcess front;
  write_file_atomic(front.file("c.yaml"), "train:\n  steps: 3\n");
  for (const Words& words :
       {Words{"c.yaml", "--train.global_batch", "32"}, Words{"--train.global_batch", "32", "c.yaml"},
        Words{"--model.tie_embeddings", "c.yaml", "--train.global_batch=32"}}) {
    const auto config = resolved(front, words);
    EXPECT_EQ(config["train"]["steps"], 3);
    EXPECT_EQ(config["train"]["global_batch"], 32);
  }
}

TEST(ConfigShow, LaterSourcesWinAndAreNamed) {
  FrontProcess front;
  write_file_atomic(front.file("c.yaml"), "train:\n  steps: 3\n  global_batch: 4\nseed: 9\n");
  front.set("TRIREME__TRAIN__STEPS", "5");
  const auto config = resolved(front, {"c.yaml", "--train.global_batch=8", "--origin"});
  EXPECT_EQ(config["train"]["steps"]["value"], 5);
  EXPECT_EQ(config["train"]["steps"]["origin"], "TRIREME__TRAIN__STEPS");
  EXPECT_EQ(config["train"]["global_batch"]["value"], 8);
  EXPECT_EQ(config["train"]["global_batch"]["origin"], "--train.global_batch");
  EXPECT_EQ(config["seed"]["value"], 9);
  EXPECT_TRUE(contains(config["seed"]["origin"], "c.yaml:4")) << config["seed"]["origin"];
  EXPECT_EQ(config["optim"]["name"]["origin"], "default");
}

TEST(ConfigShow, SaysWhatAPresetReplacesAndWhatIsCut) {
  const FrontProcess front;
  write_file_atomic(
      front.file("c.yaml"),
      "model: {family: resnet, depth: 8}\ntrain: {steps: 90}\noptim: {name: sgd, warmup_steps: 9}\n");
  const Words words = {"c.yaml", "--model.preset=resnet18-cifar", "--train.steps=5", "--device=cpu"};
  const auto expect_notes = [](const std::string& text) {
    EXPECT_TRUE(contains(text, "(--model.preset) replaces model.depth=8 (c.yaml:1:25)")) << text;
    EXPECT_TRUE(contains(text, "optim.warmup_steps=9 (c.yaml:3:20) is cut to train.steps=5")) << text;
  };
  const Outcome shown = front.run(Words{"config", "show", "--origin"} + words);
  expect_notes(shown.err);
  EXPECT_TRUE(contains(shown.out, "weight_decay: 0.0 ")) << shown.out;
  EXPECT_TRUE(contains(shown.out, "# derived: optim.name")) << shown.out;
  const Outcome planned = front.run(Words{"train", "--dry-run", "--json"} + words);
  ASSERT_EQ(planned.code, 0) << planned.err;
  EXPECT_EQ(planned.json()["params"], 11173962);
  ASSERT_EQ(planned.json()["notes"].size(), 2U);
  expect_notes(planned.json()["notes"].dump());
  const Outcome table = front.run(Words{"train", "--dry-run"} + words);
  EXPECT_TRUE(contains(table.out, "resnet resnet18-cifar, 11,173,962 parameters")) << table.out;
}

TEST(ConfigShow, YamlReadsBackToTheSameConfig) {
  const FrontProcess front;
  const Words odd = {"--train.sample_prompt=a: b # \"c\"\n", "--optim.lr=1e-7", "--model.preset=llama-tiny"};
  Words words = {"config", "show"};
  words.insert(words.end(), odd.begin(), odd.end());
  write_file_atomic(front.file("shown.yaml"), front.run(words).out);
  EXPECT_EQ(resolved(front, {"shown.yaml"}), resolved(front, odd));
}

TEST(ConfigSchema, CoversEveryKeyThatIsListed) {
  const FrontProcess front;
  const auto schema = front.run({"config", "schema"}).json();
  const auto keys = front.run({"config", "keys", "--json"}).json()["keys"];
  EXPECT_GT(keys.size(), 30u);
  const std::string text = front.run({"config", "keys"}).out;
  for (const auto& row : keys) {
    const std::string key = row["key"];
    const size_t dot = key.find('.');
    const auto& properties = schema["properties"];
    const bool known = dot == std::string::npos
                           ? properties.contains(key)
                           : properties[key.substr(0, dot)]["properties"].contains(key.substr(dot + 1));
    EXPECT_TRUE(known) << key;
    EXPECT_TRUE(contains(text, key)) << key;
  }
}

struct Refusal {
  Words words;
  Words said;  ///< all of these on stderr
};

TEST(Train, RefusesBadConfigsBeforeAnythingStarts) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("typo.yaml"), "train:\n  steps: 3\n  globl_batch: 4\n");
  const Refusal refusals[] = {
      {{"typo.yaml"}, {"typo.yaml:3:3", "globl_batch", "global_batch"}},
      {{"absent.yaml"}, {"absent.yaml"}},
      {{"--train.stepz=3"}, {"train.stepz", "train.steps"}},
      {{"--model.preset=gpt-tini"}, {"gpt-tini", "gpt-tiny"}},
      {{"--parallel.policy=zero5"}, {"zero5"}},
      {{"--train.steps=many"}, {"train.steps", "many"}},
      {{"--optim.lr=fast"}, {"optim.lr", "fast"}},
      {{"--model.d_model=100", "--model.n_heads=3"}, {"d_model", "100", "n_heads", "3"}},
      {{"-n", "2", "--train.global_batch=7"}, {"global_batch 7", "2 ranks"}},
      {{"-n", "2", "--train.global_batch=16", "--train.micro_batch=3"}, {"global_batch 16", "micro_batch 3"}},
      {{"-n", "3", "--parallel.dp_shard=2", "--train.global_batch=6"}, {"dp_shard", "2", "3"}},
      {{"-n", "0"}, {"-n is 0"}},
      {{"--name=latest"}, {"name=latest", "choose another name"}},
  };
  for (const Refusal& refusal : refusals) {
    Words words = {"train", "--device=cpu"};
    words.insert(words.end(), refusal.words.begin(), refusal.words.end());
    const Outcome outcome = front.run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(outcome.err.starts_with("error: [")) << outcome.err;
    for (const std::string& part : refusal.said)
      EXPECT_TRUE(contains(outcome.err, part)) << part << "\n" << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

TEST(Train, RefusesHalfSetLauncherVariables) {
  FrontProcess front;
  front.set_worker("touch started");
  front.set("RANK", "0");
  const Outcome outcome = front.run({"train", "--device=cpu"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "WORLD_SIZE")) << outcome.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

TEST(ConfigFile, IsAnArgumentOrAnOptionAndNotBoth) {
  const FrontProcess front;
  write_file_atomic(front.file("a.yaml"), "seed: 7\n");
  write_file_atomic(front.file("b.yaml"), "seed: 8\n");
  const Outcome as_argument = front.run({"config", "show", "a.yaml"});
  EXPECT_TRUE(contains(as_argument.out, "seed: 7\n")) << as_argument.err;
  for (const std::vector<std::string>& option :
       {std::vector<std::string>{"--config", "a.yaml"}, {"--config=a.yaml"}}) {
    std::vector<std::string> command = {"config", "show"};
    command.insert(command.end(), option.begin(), option.end());
    EXPECT_EQ(front.run(command).out, as_argument.out);
  }
  const Outcome both = front.run({"config", "show", "a.yaml", "--config", "b.yaml"});
  EXPECT_EQ(both.code, 2);
  EXPECT_TRUE(contains(both.err, "--config")) << both.err;
  const Outcome plan = front.run({"train", "--config", "absent.yaml", "--dry-run"});
  EXPECT_EQ(plan.code, 2);
  EXPECT_TRUE(contains(plan.err, "absent.yaml")) << plan.err;
}

}  // namespace
}  // namespace trireme::cli
