// Adapters with dropout on ranks that are processes, of which each has a random generator of its own; and the
// runs that `trireme ckpt merge` makes of adapters and their base.
#include <fmt/format.h>

#include <filesystem>
#include <set>
#include <string>

#include "tests/cli/worker_fixture.h"
#include "trireme/base/file.h"
#include "trireme/checkpoint/source.h"

namespace trireme::cli {
namespace {

TEST_F(Worker, AdaptersDropTheSameOnEveryRankUnderEveryPolicyAndInBlocksThatAreComputedAgain) {
  const Words words =
      kTiny +
      Words{"-n", "2", "--train.steps=3", "--adapter.kind=lora", "--adapter.rank=2", "--adapter.dropout=0.3"};
  std::set<std::string> digests;
  const auto train = [&](const Words& more) -> std::string {
    const Outcome outcome = front_.run(words + more);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(read_file(run_file("summary.json")))["weights_digest"];
  };
  for (const char* policy : {"ddp", "zero1", "zero2", "zero3", "fsdp"})
    digests.insert(train({fmt::format("--parallel.policy={}", policy)}));
  digests.insert(train({"--memory.recompute=block"}));
  EXPECT_EQ(digests.size(), 1u);
  EXPECT_FALSE(digests.contains(train({"--adapter.dropout=0"})));
}

/// A base, and adapters that were trained on it and saved at steps 2 and 4.
class MergedRun : public Worker {
 protected:
  void train(const Words& words) {
    const Outcome outcome = front_.run(kTiny + Words{"-n", "2", "--train.steps=4"} + words);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  void train_both(const Words& adapter, const Words& model = {}) {
    train(Words{"--name=base", "--seed=7"} + model);
    train(Words{"--name=tuned", "--model.weights=base", "--checkpoint.every=2", "--optim.lr=0.02",
                "--adapter.rank=4"} +
          adapter + model);
    tuned_ = std::filesystem::canonical(front_.file("runs/latest"));
  }
  /// The weights of the run that was made.
  std::string merged(const Words& words) {
    const Outcome outcome = front_.run(Words{"ckpt", "merge"} + words + Words{"--json"});
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return outcome.code == 0 ? front_.file(outcome.json()["run"]) + "/" + kWeights : "";
  }
  static size_t differing(const std::string& a, const std::string& b) {
    return checkpoint::compare(*checkpoint::open_source(a), *checkpoint::open_source(b)).size();
  }

  static constexpr const char* kWeights = "checkpoints/final/model.safetensors";
  std::string tuned_;
};

TEST_F(MergedRun, HasTheWeightsThatTheRunItselfLeavesBitForBit) {
  for (const char* kind : {"lora", "dora"}) {
    for (const char* family : {"gpt2", "llama"}) {
      train_both({fmt::format("--adapter.kind={}", kind)}, {fmt::format("--model.family={}", family)});
      const std::string left = tuned_ + "/" + kWeights;
      EXPECT_EQ(differing(merged({"tuned"}), left), 0u) << kind << " " << family;
      EXPECT_EQ(differing(merged({tuned_ + "/checkpoints/step-00000004"}), left), 0u)
          << kind << " " << family;
      EXPECT_GT(differing(merged({tuned_ + "/checkpoints/step-00000002"}), left), 0u)
          << kind << " " << family;
      const std::string copy = front_.file(fmt::format("peft-{}-{}", kind, family));
      std::filesystem::copy(tuned_ + "/checkpoints/final/adapter", copy);
      EXPECT_EQ(differing(merged({copy}), left), 0u) << "on what PEFT's config names";
      EXPECT_EQ(differing(merged({copy, "--base", "base", "--name", "again"}), left), 0u);
    }
  }
}

TEST_F(MergedRun, IsARunThatOtherCommandsTake) {
  train_both({"--adapter.kind=lora", "--checkpoint.final_weights=false"});
  EXPECT_FALSE(std::filesystem::exists(tuned_ + "/" + kWeights));
  const Outcome made = front_.run({"ckpt", "merge", "tuned", "--name", "both"});
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_TRUE(contains(made.out, "runs/both")) << made.out;
  const Outcome text = front_.run({"generate", "both", "--max-tokens", "4"});
  EXPECT_EQ(text.code, 0) << text.err;
  const Outcome exported = front_.run({"ckpt", "export-hf", "both", front_.file("out"), "--dtype", "bf16"});
  EXPECT_EQ(exported.code, 0) << exported.err;
  train({"--name=further", "--model.weights=both", "--train.steps=1"});
}

TEST_F(MergedRun, RefusesAnotherBaseAndWhatHoldsNoAdapters) {
  train_both({"--adapter.kind=lora"});
  train({"--name=other", "--seed=8"});
  const auto refused = [&](const Words& words, const std::vector<std::string>& parts) {
    const Outcome outcome = front_.run(Words{"ckpt", "merge"} + words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    for (const std::string& part : parts)
      EXPECT_TRUE(contains(outcome.err, part)) << part << ": " << outcome.err;
  };
  refused({"tuned", "--base", "other"}, {"digest fp32 ", "other", "--any-base"});
  EXPECT_GT(differing(merged({"tuned", "--base", "other", "--any-base"}), tuned_ + "/" + kWeights), 0u);
  refused({"base"}, {"adapters"});
  refused({"nowhere"}, {"nowhere"});
  refused({front_.file("text.txt")}, {"text.txt", "adapter_config.json"});
  refused({"tuned", "--base", "nowhere"}, {"nowhere"});
  refused({"tuned", "--name", "a/b"}, {"name=a/b"});
  const std::string elsewhere = front_.file("elsewhere");
  std::filesystem::copy(tuned_ + "/checkpoints/final/adapter", elsewhere);
  std::filesystem::copy(tuned_ + "/" + kWeights, front_.file("lone.safetensors"));
  refused({elsewhere, "--base", front_.file("lone.safetensors")}, {"lone.safetensors", "--base a run"});
  const Outcome alone = front_.run({"ckpt", "export-hf", tuned_ + "/checkpoints/step-00000002", "x"});
  EXPECT_EQ(alone.code, 2);
  EXPECT_TRUE(contains(alone.err, "trireme ckpt merge")) << alone.err;
  train({"--name=fresh", "--adapter.kind=lora"});
  refused({"fresh"}, {"random weights of seed=42", "--base WEIGHTS"});
  std::filesystem::copy(tuned_ + "/checkpoints/final/adapter", front_.file("gone"));
  std::filesystem::remove(front_.file("gone/adapter_model.safetensors"));
  refused({front_.file("gone")}, {"adapter_model.safetensors"});
}

/// A checkpoint has what is added to the lengths of the rows of its own base, and is no use on another one.
TEST_F(MergedRun, KnowsLengthsFromWhatIsAddedToThem) {
  train_both({"--adapter.kind=dora", "--adapter.base=nf4", "--parallel.policy=fsdp"}, {"--model.d_model=64"});
  EXPECT_GT(differing(merged({"tuned", "--any-base"}), tuned_ + "/" + kWeights), 0u);
  const Outcome outcome = front_.run({"ckpt", "merge", tuned_ + "/checkpoints/step-00000004", "--any-base"});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_TRUE(contains(outcome.err, "checkpoints/final/adapter")) << outcome.err;
}

TEST_F(MergedRun, IsNotMadeOfNumbersThatAreNotFinite) {
  train_both({"--adapter.kind=lora"});
  const std::string copy = front_.file("latest");  // a name that no run may have
  std::filesystem::copy(tuned_ + "/checkpoints/final/adapter", copy);
  EXPECT_EQ(front_.run({"ckpt", "merge", copy, "--name", "fine"}).code, 0);
  nlohmann::json config = nlohmann::json::parse(read_file(copy + "/adapter_config.json"));
  config["lora_alpha"] = 1e300;
  write_file_atomic(copy + "/adapter_config.json", config.dump());
  const Outcome outcome = front_.run({"ckpt", "merge", copy, "--name", "bad"});
  EXPECT_EQ(outcome.code, 7) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "not finite")) << outcome.err;
}

/// The real worker at rising rates: the loss of a tiny model falls somewhere and then explodes.
TEST_F(Worker, RisingLearningRatesShowWhereTheLossFallsAndWhereItDiverges) {
  const Words words = {"find-lr",
                       "--device=cpu",
                       "--data.path=text.txt",
                       "--model.n_layers=1",
                       "--model.d_model=32",
                       "--data.seq_len=32",
                       "--train.global_batch=4",
                       "-n",
                       "2"};
  const Outcome outcome =
      front_.run(words + Words{"--steps", "60", "--min", "1e-5", "--max", "10", "--json"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const nlohmann::json found = outcome.json();
  ASSERT_TRUE(found["steepest"].is_number() && found["diverged"].is_number()) << outcome.out;
  EXPECT_GT(found["steepest"], 1e-5);
  EXPECT_LT(found["steepest"], found["diverged"]);
  EXPECT_DOUBLE_EQ(found["lr"][0], 1e-5);
  EXPECT_GE(found["lr"].size(), 20u);
  EXPECT_TRUE(std::filesystem::exists(front_.file(found["page"])));
  EXPECT_FALSE(std::filesystem::exists(front_.file("runs/latest"))) << "it is no run to go on with";
  const Outcome plain = front_.run(words + Words{"--steps", "20", "--max", "1e-6", "-o", "page.html"});
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_TRUE(contains(plain.out, "falls fastest at  nowhere")) << plain.out;
  ASSERT_EQ(front_.run(kTiny + Words{"-n", "2", "--train.steps=2", "--name=begun"}).code, 0);
  const Words further = {"find-lr",
                         "--device=cpu",
                         "--data.path=text.txt",
                         "--model.n_layers=2",
                         "--model.d_model=32",
                         "--data.seq_len=32",
                         "--train.global_batch=4",
                         "-n",
                         "2",
                         "--steps",
                         "20",
                         "--model.weights=begun"};
  EXPECT_EQ(front_.run(further).code, 0) << front_.run(further).err;
  EXPECT_TRUE(std::filesystem::exists(front_.file("page.html")));
  for (const Words& wrong : {Words{"--min", "0"}, Words{"--min", "1", "--max", "0.1"}, Words{"--steps", "5"},
                             Words{"-o", "nowhere/page.html"}, Words{"--optim.rl=1"}})
    EXPECT_EQ(front_.run(words + wrong).code, 2);
}

}  // namespace
}  // namespace trireme::cli
