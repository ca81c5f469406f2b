// `bench run` with a script in the worker's place: what is refused before any rank starts, in which order
// runs are made, and what is left of a bench in which something went wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "tests/cli/front_process.h"
#include "trireme/base/file.h"
#include "trireme/cli/bench_words.h"
#include "trireme/plan/rates.h"

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
      {{"--targets", "ddp", "--profile", "deeep"}, "did you mean 'deep'"},
      {{"--targets", "ddp", "--profile", "nsys"}, "choose none, minimal, deep, roofline"},
      {{"--targets", "ddp", "--probe", "rates.json"}, "--probe rates.json is for --profile roofline"},
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

TEST(BenchRun, RefusesAFolderThatCannotHoldItsResults) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("text.txt"), "no folder");
  for (const Words& more : {Words{}, Words{"--dry-run"}}) {
    const Outcome outcome =
        front.run(Words{"bench", "run", "--targets", "ddp", "--out", "text.txt/results"} + more);
    EXPECT_EQ(outcome.code, 3) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "results cannot be written to text.txt/results")) << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
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

/// Ranks that were done heed no signal, and the measurement still does.
TEST(BenchRun, StopsAlsoWhereASignalComesWithTheEndOfARun) {
  FrontProcess front;
  front.set_worker("trap '' INT\n" + trains("10") + "[ \"$RANK\" = 0 ] && kill -INT $PPID\nsleep 0.3\n");
  const Outcome stopped = front.run(bench({"--targets", "ddp", "--replicates", "1"}));
  EXPECT_EQ(stopped.code, 130) << stopped.err;
  const std::string order = read_file(front.file("order"));
  EXPECT_EQ(std::ranges::count(order, '\n'), 1) << "a second arm was begun: " << order;
  EXPECT_TRUE(contains(stopped.err, "--continue --out out")) << stopped.err;
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

/// A run that is asked for a trace leaves one, with a profile of `gemm_ms` (a shell word) in products, and
/// says in `traced` which arm it was; "0 ..." is a run without.
std::string traces(const std::string& gemm_ms = "8") {
  return "traced=$(key profile_steps); echo \"$traced $overlap\" >> traced\n"
         "if [ \"$traced\" -gt 0 ]; then\n"
         "mkdir -p \"$run\"/traces; echo '{\"traceEvents\": [{\"ph\": \"X\"}]}' > "
         "\"$run\"/traces/rank-0.json\n"
         "sed -i \"s/ .stop_signal.: null}/ \\\"profile\\\": {\\\"of\\\": \\\"CPU operators\\\", "
         "\\\"steps\\\": $traced, \\\"step_ms\\\": 12, \\\"idle_ms\\\": 1, \\\"groups\\\": [{\\\"name\\\": "
         "\\\"GEMM\\\", \\\"ms\\\": " +
         gemm_ms +
         ", \\\"calls\\\": 9}, {\\\"name\\\": \\\"communication\\\", \\\"ms\\\": 3, \\\"calls\\\": 2}]}, "
         "\\\"stop_signal\\\": null}/\" \"$run\"/summary.json\n"
         "fi\n";
}

nlohmann::json first_target(const FrontProcess& front) {
  return nlohmann::json::parse(read_file(front.file("out/results.json")))["targets"][0];
}

TEST(BenchRun, ADeepProfileTracesEachArmBehindTheTimedRuns) {
  FrontProcess front;
  front.set_worker(trains("10") + traces());
  const Outcome outcome = front.run(bench({"--targets", "ddp", "--replicates", "1", "--profile", "deep"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  const std::string all = read_file(front.file("traced")), last = "4 false\n4 true\n";
  EXPECT_TRUE(all.ends_with(last)) << all;
  EXPECT_FALSE(contains(all.substr(0, all.size() - last.size()), "4 "))
      << "timed runs are not traced: " << all;
  const auto target = first_target(front);
  EXPECT_EQ(target["samples"].size(), 4u) << "traced runs are no samples";
  ASSERT_EQ(target["profiles"].size(), 2u);
  const auto& profile = target["profiles"][1];
  EXPECT_EQ(profile["of"], "CPU operators");
  EXPECT_EQ(profile["groups"][0]["name"], "GEMM");
  EXPECT_EQ(profile["groups"][0]["calls"], 9);
  EXPECT_TRUE(std::filesystem::exists(front.file(profile["trace"]))) << profile["trace"];
  EXPECT_TRUE(contains(outcome.out, "calls/step")) << outcome.out;
  EXPECT_FALSE(contains(outcome.out, "of roof")) << outcome.out;
}

TEST(BenchRun, AProfileThatFailsIsSaidAndTheVerdictStays) {
  FrontProcess front;
  front.set_worker(
      "[ -e mended ] || case \"$TRIREME_REQUEST\" in *'overlap: true'*'profile_steps: 4'*|*'profile_steps: "
      "4'*'overlap: true'*) exit 6;; esac\n" +
      trains("10") + traces());
  const Outcome outcome = front.run(bench({"--targets", "ddp", "--replicates", "1", "--profile", "deep"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "no profile: a run ended with code 6")) << outcome.out;
  EXPECT_EQ(first_target(front)["state"], "measured");
  EXPECT_FALSE(first_target(front)["scores"][1]["ratio"].is_null());

  write_file_atomic(front.file("mended"), "");
  std::filesystem::remove(front.file("traced"));
  const Outcome again = front.run({"bench", "run", "--continue", "--out", "out"});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(read_file(front.file("traced")), "4 true\n") << "the one that failed is made again, and no other";
  EXPECT_EQ(first_target(front)["profiles"][1]["error"], "");
}

/// Rates of a CPU rank of the kind that tests have, measured with two at once.
void write_rates(const FrontProcess& front) {
  plan::Rates rates = plan::usual_rates(plan::Device::kCpu);
  rates.ranks = 2;
  rates.measured = true;
  write_file_atomic(front.file("rates.json"), plan::to_json(rates));
}

TEST(BenchRun, ARooflineHoldsWorkAgainstTheRatesOfTheMachine) {
  FrontProcess front;
  write_rates(front);
  front.set_worker(trains("10") + traces("8000"));
  const Outcome outcome = front.run(
      bench({"--targets", "ddp", "--replicates", "1", "--profile", "roofline", "--probe", "rates.json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  const auto profile = first_target(front)["profiles"][0];
  const auto& products = profile["rates"][0];
  EXPECT_EQ(products["group"], "GEMM");
  const double flops = products["flops"], peak = profile["roof"]["flops_per_s"];
  EXPECT_GT(flops, 0.0);
  EXPECT_NEAR(products["flops_per_s"].get<double>(), flops / 8.0, 1e-9 * flops);
  EXPECT_NEAR(products["flops_per_byte"].get<double>(), flops / products["bytes"].get<double>(), 1e-9);
  EXPECT_GE(products["share_of_roof"].get<double>(), 0.999 * flops / 8.0 / peak);
  EXPECT_TRUE(profile["rates"][1]["flops"].is_null()) << "messages are not counted";
  EXPECT_TRUE(contains(outcome.out, "not counted")) << outcome.out;
}

TEST(BenchRun, AShareAboveOneBlocksTheTarget) {
  FrontProcess front;
  write_rates(front);
  front.set_worker(trains("10") + traces("1e-6"));
  const Outcome outcome = front.run(
      bench({"--targets", "ddp", "--replicates", "1", "--profile", "roofline", "--probe", "rates.json"}));
  EXPECT_EQ(outcome.code, 8) << outcome.err << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "no kind of kernel is faster than this machine was measured to be"))
      << outcome.out;
}

TEST(BenchRun, ARooflineMeasuresRatesOnceForTheSameRanks) {
  FrontProcess front;
  write_rates(front);
  front.set_worker(
      "if [ \"$1\" = rates ]; then [ \"$RANK\" = 0 ] || exit 0; echo rates >> measured\n"
      "cp rates.json \"$(printf %s \"$TRIREME_REQUEST\" | sed "
      "'s/.*\"rates\":{[^}]*\"file\":\"\\([^\"]*\\)\".*/\\1/')\"; "
      "exit "
      "0; "
      "fi\n" +
      trains("10") + traces("8000"));
  const Outcome outcome =
      front.run(bench({"--targets", "ddp,zero1", "-n", "2", "--replicates", "1", "--profile", "roofline"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  EXPECT_EQ(read_file(front.file("measured")), "rates\n");
  EXPECT_TRUE(first_target(front)["profiles"][1].contains("roof")) << first_target(front)["profiles"];
}

TEST(BenchRun, RatesThatDoNotFitAreRefusedBeforeAnyRankStarts) {
  FrontProcess front;
  front.set_worker("touch started");
  write_file_atomic(front.file("gpu.json"), plan::to_json(plan::usual_rates(plan::Device::kCuda, "h200")));
  const std::pair<const char*, const char*> refused[] = {{"gpu.json", "but the run is planned for cpu"},
                                                         {"nowhere.json", "cannot open nowhere.json"}};
  for (const auto& [file, why] : refused) {
    const Outcome outcome = front.run(bench({"--targets", "ddp", "--profile", "roofline", "--probe", file}));
    EXPECT_NE(outcome.code, 0);
    EXPECT_TRUE(contains(outcome.err, why)) << outcome.err;
  }
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
}

TEST(BenchRun, OfRatesOfOtherRanksThereIsNoRoof) {
  FrontProcess front;
  write_rates(front);
  front.set_worker(trains("10") + traces("8000"));
  const Outcome outcome = front.run(bench({"--targets", "zero1", "-n", "4", "--replicates", "1", "--profile",
                                           "roofline", "--probe", "rates.json"}));
  ASSERT_EQ(outcome.code, 0) << outcome.err << outcome.out;
  EXPECT_TRUE(contains(outcome.out, "no roof: rates.json has the rates of 2 ranks at once")) << outcome.out;
}

TEST(BenchRun, ADryRunSaysWhatAProfileAdds) {
  FrontProcess front;
  front.set_worker("touch started");
  const auto said = [&](const char* depth) {
    return front.run(bench({"--targets", "ddp", "--profile", depth, "--dry-run"})).out;
  };
  EXPECT_FALSE(contains(said("minimal"), "profile takes")) << said("minimal");
  EXPECT_TRUE(contains(said("deep"), "a run of 14 steps for each arm, 4 of them traced\n")) << said("deep");
  EXPECT_TRUE(contains(said("roofline"), "and the rates of this machine")) << said("roofline");
  EXPECT_FALSE(std::filesystem::exists(front.file("started")));
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
