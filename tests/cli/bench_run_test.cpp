// `bench run` with a script in the worker's place: what is refused before any rank starts, in which order
// runs are made, and what is left of a bench in which something went wrong.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/cli/front_process.h"
#include "trireme/base/file.h"
#include "trireme/cli/bench_words.h"

namespace trireme::cli {
namespace {

/// Takes `$1` of its request's keys: "overlap", "bucket_mib".
const std::string kReadRequest =
    "run=$(printf %s \"$TRIREME_REQUEST\" | sed 's/.*\"run_dir\":\"\\([^\"]*\\)\".*/\\1/')\n"
    "[ \"$RANK\" = 0 ] || exit 0\n"
    "key() { printf %s \"$TRIREME_REQUEST\" | sed \"s/.* $1: \\\\([^ \\\\\\\\]*\\\\).*/\\\\1/\"; }\n";

/// A run of as many steps as were asked for, of `ms` milliseconds (a shell word), with losses that depend on
/// nothing but the step, `digest` and `bytes` of the wire.
std::string trains(const std::string& ms, const std::string& digest = "00ff") {
  return kReadRequest + "steps=$(key steps); overlap=$(key overlap); ms=" + ms + "; digest=" + digest +
         "\n"
         "echo \"$overlap $WORLD_SIZE $OMP_NUM_THREADS $EXTRA\" >> order\n"
         "awk -v n=$steps -v ms=$ms -v salt=$$ 'BEGIN { for (i = 1; i <= n; ++i) printf \"{\\\"step\\\": %d, "
         "\\\"loss\\\": %.6f, \\\"step_ms\\\": %.9f, \\\"tokens\\\": %d}\\n\", i, 5 - 0.01 * i, ms * (1 + "
         "1e-9 * (salt "
         "% 100000)) + 1e-6 * i, 512 * i }' > \"$run\"/metrics.jsonl\n"
         "cat > \"$run\"/summary.json << END\n"
         "{\"steps\": $steps, \"final_loss\": 1.0, \"final_val_loss\": null, \"tokens_per_s\": 1, "
         "\"steps_per_s\": 1,\n"
         " \"peak_bytes\": 8, \"baseline_bytes\": 1, \"predicted_peak_bytes\": 8, \"seconds_to_first_step\": "
         "0.1,\n"
         " \"wall_s\": 100.0, \"weights_digest\": \"$digest\", \"deterministic\": true,\n"
         " \"state_bytes\": {\"predicted\": {\"parameters\": 1, \"gradients\": 1, \"optimizer\": 2},\n"
         "                 \"measured\": {\"parameters\": 1, \"gradients\": 1, \"optimizer\": 2}},\n"
         " \"wire_bytes_per_step\": {\"predicted\": 1, \"measured\": 1}, \"gathered_bytes\": {\"predicted\": "
         "0},\n"
         " \"activation_bytes\": {\"predicted\": 1, \"measured\": null},\n"
         " \"communication_ms\": {\"total\": null, \"exposed\": null}, \"sample\": \"\", \"weights\": null,\n"
         " \"stop_signal\": null}\n"
         "END\n";
}

const Words kFew = {"--device=cpu", "--iterations", "6", "--warmup", "2", "--out", "out"};

Words bench(const Words& more) {
  return Words{"bench", "run"} + kFew + more;
}

TEST(BenchRun, RefusesBeforeAnyRankStarts) {
  FrontProcess front;
  front.set_worker("touch started");
  const std::pair<Words, const char*> refused[] = {
      {{"--targets", "zero4"}, "did you mean 'zero1'"},
      {{"--targets", "ddp,zer3"}, "did you mean 'zero3'"},
      {{"--chapter", "labs/train"}, "there is no chapter"},
      {{}, "there is nothing to measure"},
      {{"--targets", "ddp", "--profile", "deepest"}, "--profile"},
      {{"--targets", "ddp", "--parallel.overlap=false"}, "train:ddp compares values of parallel.overlap"},
      {{"--targets", "ddp", "--train.steps=5"}, "--iterations"},
      {{"--targets", "ddp", "--target-extra-arg", "zero1=--steps 4"}, "not among the targets"},
      {{"--targets", "ddp", "--target-extra-arg", "ddp=--stepz 4"}, "did you mean --steps"},
      {{"--targets", "ddp", "--target-extra-arg", "ddp=\"--n-stages 4\""}, "is of pipelines"},
      {{"--targets", "pipeline_dualpipe", "--target-extra-arg", "dualpipe=--dual-window 16"}, "trireme lab"},
      {{"--targets", "ddp", "--target-extra-arg", "ddp=--data.seq_length=64"}, "data.seq_len"},
      {{"--targets", "ddp", "--torchrun-env", "RANK=1"}, "the launcher sets RANK itself"},
      {{"--targets", "ddp", "--torchrun-env", "NOT_THERE"}, "there is no such variable"},
      {{"--config", "nowhere.yaml", "--arms", "parallel.policy=ddp,fsdp"}, "nowhere.yaml"},
      {{"--targets", "ddp", "--arms", "parallel.policy=ddp,fsdp"}, "belong together"}};
  for (const auto& [words, why] : refused) {
    const Outcome outcome = front.run(bench(words));
    EXPECT_EQ(outcome.code, 2) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, why)) << why << "\n" << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
  EXPECT_FALSE(std::filesystem::exists(front.file("out")));
}

TEST(BenchRun, RefusesArmsThatTrainSomethingElse) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("mine.yaml"), "train: {global_batch: 4}\n");
  for (const char* arms :
       {"optim.lr=1e-3,1e-2", "parallel.policy", "parallel.policy=ddp", "parallel.policy=ddp,"}) {
    const Outcome outcome = front.run(bench({"--config", "mine.yaml", "--arms", arms}));
    EXPECT_EQ(outcome.code, 2) << arms << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

TEST(BenchRun, TorchrunArgsAreHonouredOrRefused) {
  FrontProcess front;
  front.set_worker("touch started");
  const auto with = [&](const char* words) {
    front.set("TORCHRUN_ARGS", words);
    return front.run(bench({"--targets", "zero1", "--dry-run"}));
  };
  const Outcome four = with("--standalone --nproc_per_node=4 --nnodes 1");
  EXPECT_EQ(four.code, 0) << four.err;
  EXPECT_TRUE(contains(four.out, "zero1      4     6")) << four.out;
  const Outcome nodes = with("--nnodes 2 --nproc-per-node 2");
  EXPECT_EQ(nodes.code, 2);
  EXPECT_TRUE(contains(nodes.err, "--nnodes 2")) << nodes.err;
  EXPECT_EQ(with("--rdzv_endpoint=host:29500").code, 2);
}

/// A published command as it stands: a batch of its own, and one arm, with which nothing is compared.
TEST(BenchRun, TrainsOneArmWithTheFlagsOfItsScript) {
  FrontProcess front;
  front.set_worker("touch started");
  const Outcome outcome =
      front.run(bench({"--targets", "labs/train_distributed/train_fsdp.py", "--dry-run", "--target-extra-arg",
                       "train_fsdp.py=\"--mode optimized --steps 4 --sequence-length 64 --micro-batch-size 1 "
                       "--grad-accum 2\""}));
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  for (const char* key :
       {"--data.seq_len=64", "--train.micro_batch=1", "--train.rank_batch=2", "--memory.recompute=block"})
    EXPECT_TRUE(contains(outcome.out, key)) << key << outcome.out;
  EXPECT_FALSE(contains(outcome.out, "baseline")) << outcome.out;
}

TEST(BenchRun, ArmsAlternateAndRatiosAreOfNeighbours) {
  FrontProcess front;
  front.set("OMP_NUM_THREADS", "1");
  front.set_worker(trains("$([ $overlap = true ] && echo 10 || echo 12)"));
  const Outcome outcome =
      front.run(bench({"--targets", "ddp", "--replicates", "2", "--torchrun-env", "EXTRA=yes"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  const std::string pair = "false 2 1 yes\ntrue 2 1 yes\ntrue 2 1 yes\nfalse 2 1 yes\n";
  const std::string order = read_file(front.file("order"));
  EXPECT_TRUE(order.starts_with(pair + pair)) << order;
  EXPECT_TRUE(contains(order, " 1 1 yes\n")) << "one rank verifies: " << order;
  const auto json = nlohmann::json::parse(read_file(front.file("out/results.json")));
  const auto& score = json["targets"][0]["scores"][1];
  EXPECT_EQ(score["ratios"].size(), 4u);
  EXPECT_NEAR(score["ratio"], 1.2, 1e-3);
  EXPECT_EQ(score["verdict"], "perhaps faster");
  EXPECT_EQ(json["environment"][0], "EXTRA=yes");
  EXPECT_TRUE(json["complete"]);
  for (const char* name : {"out/report.md", "out/report.html"})
    EXPECT_TRUE(std::filesystem::exists(front.file(name))) << name;
  EXPECT_FALSE(std::filesystem::exists(front.file("runs/latest"))) << "no training run looks like these";

  const Outcome again = front.run(bench({"--targets", "ddp"}));
  EXPECT_EQ(again.code, 2) << "the folder has results already";
  const Outcome csv = front.run({"bench", "export", "csv", "out"});
  EXPECT_TRUE(csv.out.starts_with("target,mode,arm")) << csv.out;
  EXPECT_EQ(front.run({"bench", "compare", "out", "out"}).code, 0);
}

/// The time that training waits for a save lies between steps.
TEST(BenchRun, ASaveCountsForItsStep) {
  FrontProcess front;
  front.set_worker(
      trains("10") +
      "[ $(key async) = true ] || sed -i 's/\"step\": 5, /\"step\": 5, \"checkpoint_ms\": 60, /' "
      "\"$run\"/metrics.jsonl\n");
  const Outcome outcome = front.run(bench({"--targets", "checkpoint", "--replicates", "1"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  const auto json = nlohmann::json::parse(read_file(front.file("out/results.json")));
  const auto& scores = json["targets"][0]["scores"];
  ASSERT_EQ(scores.size(), 3u);
  EXPECT_NEAR(scores[1]["median_ms"], 10.0, 1e-3);
  EXPECT_NEAR(scores[2]["median_ms"], 20.0, 1e-3) << "60 ms over six steps more";
}

TEST(BenchRun, OtherWeightsBlockTheRatio) {
  FrontProcess front;
  front.set_worker(trains("10", "$overlap"));
  const Outcome outcome = front.run(bench({"--targets", "ddp", "--replicates", "1"}));
  EXPECT_EQ(outcome.code, 8) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "train:ddp is blocked")) << outcome.out;
  const auto json = nlohmann::json::parse(read_file(front.file("out/results.json")));
  EXPECT_TRUE(json["targets"][0]["scores"][1]["ratio"].is_null());
}

TEST(BenchRun, ACrashIsAFailureAndNoTime) {
  FrontProcess front;
  front.set_worker("case \"$TRIREME_REQUEST\" in *'overlap: true'*) exit 6;; esac\n" + trains("10"));
  const Outcome outcome = front.run(bench({"--targets", "ddp", "--replicates", "1"}));
  EXPECT_EQ(outcome.code, 1) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "train:ddp is failed: a run ended with code 6")) << outcome.out;
}

TEST(BenchRun, WhatDoesNotRunHereIsSkippedWithAReason) {
  FrontProcess front;
  front.set_worker("touch started");
  const Outcome outcome = front.run(bench({"--targets", "fsdp_fp8,hybrid_sharding", "-n", "2"}));
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "it needs a GPU")) << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "it takes 4 or 8 ranks, not 2")) << outcome.out;
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

/// The runs that ended well are not made again.
TEST(BenchRun, GoesOnWhereItWasStopped) {
  FrontProcess front;
  front.set_worker(
      "[ \"$RANK\" = 0 ] && [ $(wc -l < order 2> /dev/null || echo 0) = 2 ] && [ ! -e go ] && { touch go; "
      "exit 75; }\n" +
      trains("10"));
  const Outcome stopped = front.run(bench({"--targets", "ddp", "--replicates", "1"}));
  EXPECT_EQ(stopped.code, 75) << stopped.err;
  EXPECT_TRUE(contains(stopped.err, "--continue --out out")) << stopped.err;
  EXPECT_TRUE(contains(read_file(front.file("out/report.md")), "interrupted"));
  EXPECT_EQ(front.run({"bench", "run", "--continue", "--out", "out", "--replicates", "2"}).code, 2);
  const Outcome done = front.run({"bench", "run", "--continue", "--out", "out"});
  EXPECT_EQ(done.code, 0) << done.err;
  const std::string order = read_file(front.file("order"));
  EXPECT_EQ(std::count(order.begin(), order.end(), '\n'), 5) << "four runs and one on one rank: " << order;
}

TEST(BenchRun, ChecksAgainstWhatWasAccepted) {
  FrontProcess front;
  front.set_worker(trains("$([ $overlap = true ] && echo 10 || echo 12)"));
  const auto run = [&](const std::string& folder) {
    return front.run({"bench", "run", "--targets", "ddp", "--replicates", "1", "--device=cpu", "--iterations",
                      "6", "--warmup", "2", "--check", "--out", folder});
  };
  EXPECT_EQ(run("a").code, 3) << "nothing was accepted yet";
  EXPECT_EQ(front.run({"bench", "expectations", "accept", "a"}).code, 0);
  EXPECT_TRUE(contains(front.run({"bench", "expectations", "show"}).out, "train:ddp"));
  front.set_worker(trains("$([ $overlap = true ] && echo 11.9 || echo 12)"));
  const Outcome slower = run("b");
  EXPECT_EQ(slower.code, 8) << slower.err;
  EXPECT_TRUE(contains(slower.err, "slower, and a smaller ratio")) << slower.err;
}

TEST(BenchWords, FlagsOfDocumentsAreOurKeys) {
  const bench::Target& fsdp = *bench::find_targets("fsdp")[0].target;
  const TargetWords words = words_of(fsdp,
                                     "--mode optimized --steps 4 --sequence-length 1024 --micro-batch-size=1 "
                                     "--grad-accum 2 --optim.lr '1e-3' --summary");
  EXPECT_EQ(words.keys,
            (std::vector<std::string>{"data.seq_len=1024", "train.micro_batch=1", "optim.lr=1e-3"}));
  EXPECT_EQ(words.mode, "documents");
  EXPECT_EQ(words.only, "optimized");
  EXPECT_EQ(words.steps, 4);
  EXPECT_EQ(words.accumulation, 2);
  EXPECT_TRUE(words.summary);
  const bench::Target& gpipe = *bench::find_targets("pipeline_gpipe")[0].target;
  const TargetWords pipeline = words_of(gpipe, "--n-stages 2 --micro-batch-target 8 --batch-size 32");
  EXPECT_EQ(pipeline.ranks, 2);
  EXPECT_EQ(pipeline.last_micro_batches, 8);
  EXPECT_EQ(pipeline.keys, (std::vector<std::string>{"train.global_batch=32"}));
}

}  // namespace
}  // namespace trireme::cli
