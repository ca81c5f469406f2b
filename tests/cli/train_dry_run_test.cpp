// `train --dry-run`: the plan that it prints, and what it refuses.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/cli/front_process.h"
#include "tests/cli/recording_worker.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

TEST(TrainDryRun, PrintsThePlanAndStartsNothing) {
  FrontProcess front;
  front.set_worker("touch started");
  const Words command = {"train",
                         "--dry-run",
                         "--device=cpu",
                         "-n",
                         "4",
                         "--model.preset=gpt2-124m",
                         "--data.tokenizer=byte",
                         "--train.global_batch=32",
                         "--train.micro_batch=2",
                         "--parallel.policy=zero2"};
  Words json_command = command;
  json_command.push_back("--json");
  const auto json = front.run(json_command).json();
  const int64_t params = 124439808;  // GPT-2 small as published
  EXPECT_EQ(json["params"], params);
  EXPECT_EQ(json["ranks"], 4);
  EXPECT_EQ(json["batch"]["accumulation"], 4);  // 32 = 2 * 4 * 4
  EXPECT_EQ(json["state_bytes_per_rank"]["parameters"], 4 * params);
  // fp32, so no master beside the parameters; these layers leave no padding.
  EXPECT_EQ(json["state_bytes_per_rank"]["gradients"], 4 * (params / 4));
  EXPECT_EQ(json["state_bytes_per_rank"]["optimizer"], 8 * (params / 4));
  const auto peak = json["peak_bytes_per_rank"];
  EXPECT_LE(peak["kept"], json["state_bytes_per_rank"]["total"]) << "sums of gradients come and go";
  EXPECT_EQ(peak["loss"], 2 * 128 * 50257 * 4);  // micro-batch x data.seq_len x vocabulary, fp32
  EXPECT_GT(peak["activations"], 0);
  EXPECT_EQ(peak["total"], peak["kept"].get<int64_t>() + peak["gathered"].get<int64_t>() +
                               peak["activations"].get<int64_t>() + peak["loss"].get<int64_t>() +
                               peak["process"].get<int64_t>());

  const Outcome text = front.run(command);
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "124,439,808 parameters")) << text.out;
  EXPECT_TRUE(contains(text.out, "32 sequences = 2 micro-batch x 4 accumulation x 4 data-parallel ranks"))
      << text.out;
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

/// Memory on GPUs, on a machine that need not have any.
TEST(TrainDryRun, PlansForGpusThatAreElsewhere) {
  FrontProcess front;
  front.set_worker("touch started");
  const Words base = {"train",
                      "--dry-run",
                      "--json",
                      "--model.preset=llama-8b",
                      "--train.global_batch=64",
                      "--data.seq_len=4096",
                      "--precision.compute=bf16",
                      "--parallel.policy=fsdp",
                      "-n",
                      "64"};
  const auto plan = [&](const Words& more) {
    Words words = base;
    words.insert(words.end(), more.begin(), more.end());
    return front.run(words);
  };
  const auto h100 = plan({"--gpu", "h100"}).json();
  EXPECT_EQ(h100["device"], "cuda");
  EXPECT_EQ(h100["ranks"], 64);
  EXPECT_EQ(h100["memory"]["bytes"], int64_t{81559} << 20);
  EXPECT_EQ(h100["memory"]["fits"], true);
  // fp32 masters, gradients' sums and two moments over 64 ranks, and bf16 shards.
  EXPECT_NEAR(h100["state_bytes_per_rank"]["total"].get<double>(), 18.0 * h100["params"].get<double>() / 64.0,
              1e-3 * h100["params"].get<double>());
  const Outcome small = plan({"--gpu", "4"});
  EXPECT_EQ(small.code, 4) << small.err;
  EXPECT_EQ(small.json()["memory"]["fits"], false);
  EXPECT_TRUE(contains(small.err, "4.00 GiB")) << small.err;
  const auto unknown = plan({"--device=cuda"}).json();
  EXPECT_EQ(unknown["peak_bytes_per_rank"], h100["peak_bytes_per_rank"]);
  EXPECT_EQ(plan({"--gpu", "h101"}).code, 2);
  EXPECT_EQ(plan({"--gpu", "h100", "--device=cpu"}).code, 2);
  EXPECT_EQ(front.run({"train", "--gpu", "h100"}).code, 2) << "without --dry-run it would do nothing";
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

TEST(TrainDryRun, OfAPipelineShowsItsStagesAndTheMemoryOfEachRank) {
  FrontProcess front;
  front.set_worker("touch started");
  const Words command = {"train", "--dry-run",       "--device=cpu",         "-n",
                         "2",     "--parallel.pp=2", "--pipeline.split=3,1", "--pipeline.micro_batches=4"};
  Words json_command = command;
  json_command.push_back("--json");
  const auto pipeline = front.run(json_command).json()["pipeline"];
  EXPECT_EQ(pipeline["schedule"], "1f1b");
  EXPECT_EQ(pipeline["micro_batches"], 4);
  const auto peaks = pipeline["peak_bytes_by_pp_rank"];
  ASSERT_EQ(peaks.size(), 2u);
  const int64_t made = 4 * 128 * 128 * 4;  // by the first stage
  EXPECT_EQ(peaks[0]["activations"], 6 * peaks[1]["activations"].get<int64_t>() + 2 * made)
      << "three blocks of two micro-batches, beside one of one";
  EXPECT_EQ(peaks[0]["loss"], 0);
  const std::string text = front.run(command).out;
  for (const char* words : {"1f1b, 2 stages of 3, 1 blocks", "pp rank 0", "pp rank 1", "received"})
    EXPECT_TRUE(contains(text, words)) << words << " in " << text;
}

TEST(TrainPolicy, ALabelIsTakenWhereverAPolicyIs) {
  FrontProcess front;
  front.set_worker(recorder(0));
  write_file_atomic(front.file("run.yaml"), "parallel:\n  policy: fsdp:no_shard\n");
  const Outcome by_file = front.run({"train", "run.yaml", "--dry-run", "--device=cpu"});
  EXPECT_TRUE(contains(by_file.out, "fsdp:no_shard: ")) << by_file.out << by_file.err;
  const Outcome by_option =
      front.run({"train", "run.yaml", "--parallel.policy=fsdp:shard_grad_op", "--dry-run", "--device=cpu"});
  EXPECT_TRUE(contains(by_option.out, "fsdp:shard_grad_op: ")) << by_option.out << by_option.err;
  front.set("TRIREME__PARALLEL__POLICY", "fsdp:full_shard");
  const Outcome by_variable = front.run({"train", "run.yaml", "--dry-run", "--device=cpu"});
  EXPECT_TRUE(contains(by_variable.out, "fsdp:full_shard: ")) << by_variable.out << by_variable.err;
}

TEST(TrainDryRun, NamesWhatAConfigHardlyMeans) {
  FrontProcess front;
  const Outcome outcome =
      front.run({"train", "--dry-run", "--device=cpu", "--model.vocab_size=50257", "--profile=2"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out,
                       "note         byte tokens use 256 of model.vocab_size=50,257 rows; "
                       "model.vocab_size=256 saves 6.40M parameters\n"))
      << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "note         train.profile_steps=2 without a GPU")) << outcome.out;
}

TEST(TrainDryRun, ARunThatDoesNotFitEndsWithCode4AndSaysByHowMuch) {
  FrontProcess front;
  front.set_worker("touch started");
  const std::vector<std::string> command = {"train", "--device=cpu",          "-n",
                                            "2",     "--model.n_layers=2000", "--model.d_model=8192"};
  auto dry = command;
  dry.push_back("--dry-run");
  const Outcome plan = front.run(dry);
  EXPECT_EQ(plan.code, 4) << plan.err;
  EXPECT_TRUE(contains(plan.out, "memory       does not fit: ")) << plan.out;
  EXPECT_TRUE(contains(plan.out, " TiB per rank x 2 on ")) << plan.out;
  EXPECT_TRUE(contains(plan.err, "Try these in order, and combine them if needed: ")) << plan.err;
  dry.push_back("--json");
  EXPECT_EQ(front.run(dry).json()["memory"]["fits"], false);
  const Outcome real = front.run(command);
  EXPECT_EQ(real.code, 4) << real.err;
  EXPECT_TRUE(contains(real.err, "does not fit: ")) << real.err;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
  EXPECT_FALSE(std::filesystem::exists(front.file("runs")));
}

TEST(TrainDryRun, RefusesPipelinesThatCannotBeWithCode2AndTheFix) {
  const FrontProcess front;
  const auto refusal = [&](const Words& more) {
    Words words = {"train", "--dry-run", "--device=cpu"};
    words.insert(words.end(), more.begin(), more.end());
    const Outcome outcome = front.run(words);
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    return outcome.err;
  };
  EXPECT_TRUE(contains(refusal({"-n", "3", "--parallel.pp=2"}), "does not divide the world size 3"));
  EXPECT_TRUE(contains(
      refusal({"-n", "2", "--parallel.pp=2", "--pipeline.schedule=dualpipe", "--pipeline.micro_batches=2"}),
      "at least 4"));
  EXPECT_TRUE(
      contains(refusal({"-n", "2", "--parallel.pp=2", "--pipeline.file=none.csv"}), "cannot be read"));
}

}  // namespace
}  // namespace trireme::cli
