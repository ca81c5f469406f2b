// DeepSpeed's files and the words of its launcher on our command line.
#include <gtest/gtest.h>

#include <filesystem>

#include "tests/cli/front_process.h"
#include "trireme/base/file.h"
#include "trireme/plan/deepspeed.h"

namespace trireme::cli {
namespace {

const std::string kSource = TRIREME_SOURCE;
const std::string kOurConfigs = kSource + "/configs/";

Words dry_run_of(const Words& more) {
  return Words{"train", "--dry-run", "--json", "--device=cpu"} + more;
}

TEST(DeepSpeedWords, ItsThreeStagesTrainTheQuickstart) {
  const FrontProcess front;
  for (const std::string stage : {"1", "2", "3"}) {
    const Outcome outcome =
        front.run(dry_run_of({kOurConfigs + "quickstart.yaml", "--deepspeed_config",
                              kOurConfigs + "deepspeed/zero" + stage + "_config.json", "-n", "2"}));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    const auto plan = outcome.json();
    EXPECT_EQ(plan["policy"], "zero" + stage);
    EXPECT_EQ(plan["batch"]["global_batch"], 16);
    EXPECT_EQ(plan["batch"]["micro_batch"], 4);
    EXPECT_EQ(plan["batch"]["accumulation"], 2);
    EXPECT_EQ(plan["steps"], 400) << "of the quickstart";
  }
}

TEST(DeepSpeedWords, BothOptionsNameTheFileInEveryOrder) {
  const FrontProcess front;
  write_file_atomic(front.file("ds.json"), R"({"zero_optimization": {"stage": 1}})");
  write_file_atomic(front.file("c.yaml"), "train: {steps: 7}\n");
  for (const Words& words :
       {Words{"c.yaml", "--deepspeed_config", "ds.json"}, Words{"--deepspeed_config=ds.json", "c.yaml"},
        Words{"c.yaml", "--deepspeed", "ds.json"},
        Words{"c.yaml", "--deepspeed", "--deepspeed_config", "ds.json"},
        Words{"--deepspeed", "c.yaml", "--deepspeed_config", "ds.json"}}) {
    const Outcome outcome = front.run(dry_run_of(words));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.json()["policy"], "zero1");
    EXPECT_EQ(outcome.json()["steps"], 7);
  }
  const Outcome alone = front.run(dry_run_of({"--deepspeed=ds.json", "--model.preset=llama-tiny"}));
  EXPECT_EQ(alone.json()["policy"], "zero1") << alone.err;
}

TEST(DeepSpeedWords, MistakesAreRefused) {
  const FrontProcess front;
  write_file_atomic(front.file("ds.json"), "{}");
  write_file_atomic(front.file("bad.json"), "{\n \"steps_per_print\" 3}");
  const std::pair<Words, const char*> mistakes[] = {
      {{"--deepspeed"}, "--deepspeed names no file"},
      {{"c.yaml", "--deepspeed", "ds.json", "--deepspeed_config", "bad.json"}, "are two files"},
      {{"--deepspeed_config", "none.json"}, "none.json: there is no such file; give a JSON file"},
      {{"--deepspeed_config", "bad.json"}, "[plan.deepspeed] bad.json:2:20: "},
      {{"--num_nodes", "2"}, "--num_nodes 2: this command starts ranks of its own host only"}};
  for (const auto& [words, said] : mistakes) {
    const Outcome outcome = front.run(dry_run_of(words));
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, said)) << outcome.err;
  }
}

TEST(DeepSpeedWords, ItsLauncherCountsGpusAndHosts) {
  FrontProcess front;
  EXPECT_EQ(front.run(dry_run_of({"--num_gpus", "4", "--num_nodes", "1"})).json()["ranks"], 4);
  const std::pair<const char*, const char*> variables[] = {{"RANK", "0"},
                                                           {"WORLD_SIZE", "4"},
                                                           {"LOCAL_RANK", "0"},
                                                           {"MASTER_PORT", "29500"},
                                                           {"MASTER_ADDR", "127.0.0.1"}};
  for (const auto& [name, value] : variables) front.set(name, value);
  const Words hosts = {"--num_gpus=2", "--num_nodes=2"};
  EXPECT_EQ(front.run(dry_run_of(hosts)).json()["ranks"], 4);
  const Outcome wrong = front.run(dry_run_of({"--num_gpus=4", "--num_nodes=2"}));
  EXPECT_EQ(wrong.code, 2);
  EXPECT_TRUE(contains(wrong.err, "-n 4 on each of 2 hosts contradicts the 4 ranks")) << wrong.err;
  write_file_atomic(front.file("ds.json"), R"({"train_batch_size": 32, "gradient_accumulation_steps": 2})");
  EXPECT_EQ(front.run(dry_run_of(hosts + Words{"--deepspeed", "ds.json"})).json()["batch"]["micro_batch"], 4)
      << "the micro-batch of the world that it joins";
}

TEST(DeepSpeedWords, ConfigShowNamesFileAndKeyAndPrintsTheNotes) {
  const FrontProcess front;
  write_file_atomic(
      front.file("ds.json"),
      R"({"train_batch_size": 32, "gradient_accumulation_steps": 4, "wall_clock_breakdown": true,
                        "zero_optimization": {"stage": 2}})");
  const Outcome shown =
      front.run({"config", "show", "--origin", "--json", "--deepspeed_config", "ds.json", "-n", "4"});
  ASSERT_EQ(shown.code, 0) << shown.err;
  EXPECT_EQ(shown.json()["config"]["parallel"]["policy"]["origin"], "ds.json: zero_optimization.stage");
  EXPECT_EQ(shown.json()["config"]["train"]["micro_batch"]["value"], 2);
  EXPECT_TRUE(contains(shown.err, "ds.json: wall_clock_breakdown=true: ")) << shown.err;
  EXPECT_EQ(front.run({"config", "show", "--deepspeed", "ds.json"}).code, 2) << "needs the ranks";
  EXPECT_EQ(front.run({"config", "show", "-n", "4"}).code, 2) << "has no effect";
}

TEST(DeepSpeedWords, FromDeepSpeedPrintsYamlThatTrains) {
  const FrontProcess front;
  write_file_atomic(front.file("ds.json"), R"({"train_batch_size": 32, "gradient_accumulation_steps": 4,
      "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "wall_clock_breakdown": true})");
  const Outcome yaml = front.run({"config", "from-deepspeed", "ds.json", "-n", "2"});
  ASSERT_EQ(yaml.code, 0) << yaml.err;
  EXPECT_TRUE(contains(yaml.out, "\n  micro_batch: 4  # ds.json: gradient_accumulation_steps\n")) << yaml.out;
  EXPECT_TRUE(contains(yaml.out, "# ds.json: wall_clock_breakdown=true: ")) << yaml.out;
  write_file_atomic(front.file("ours.yaml"), yaml.out);
  const auto plan = front.run(dry_run_of({"ours.yaml"})).json();
  EXPECT_EQ(plan["batch"]["accumulation"], 4);
  const auto json = front.run({"config", "from-deepspeed", "ds.json", "-n", "2", "--json"}).json();
  EXPECT_EQ(json["settings"][0]["key"], "train.global_batch");
  EXPECT_EQ(json["settings"][0]["origin"], "ds.json: train_batch_size");
  EXPECT_FALSE(json["notes"].empty());
  EXPECT_EQ(front.run({"config", "from-deepspeed"}).code, 2);
}

TEST(DeepSpeedWords, ThePageHasTheTableOfKeys) {
  const Outcome table = FrontProcess().run({"config", "from-deepspeed", "--keys"});
  EXPECT_EQ(table.out, plan::describe_deepspeed_keys());
  EXPECT_TRUE(contains(read_file(kSource + "/docs/guide/deepspeed.md"), table.out))
      << "put what 'trireme config from-deepspeed --keys' prints into docs/guide/deepspeed.md";
}

}  // namespace
}  // namespace trireme::cli
