// trireme plan step: what a rank does in a step, as tables, as text that comes back, and as JSON.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>

#include "tests/cli/front_process.h"
#include "trireme/base/text.h"
#include "trireme/cli/step_view.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/presets.h"

namespace trireme::cli {
namespace {

Words step(const Words& more) {
  Words words = {"plan", "step", "--device=cpu"};
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

const Words kTiny = {"-n", "2", "--model.preset=gpt-tiny", "--parallel.policy=fsdp"};

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

/// The program of a rank on GPUs, on a machine that need not have any.
TEST(PlanStep, PrintsProgramsForGpusThatAreElsewhere) {
  FrontProcess front;
  const Words words = {"plan",
                       "step",
                       "-n",
                       "8",
                       "--gpu",
                       "h200",
                       "--model.preset=gpt2-124m",
                       "--parallel.policy=fsdp",
                       "--precision.compute=bf16",
                       "--text"};
  const Outcome printed = front.run(words);
  ASSERT_EQ(printed.code, 0) << printed.err;
  EXPECT_NE(printed.out, front
                             .run({"plan", "step", "-n", "8", "--device=cpu", "--model.preset=gpt2-124m",
                                   "--parallel.policy=fsdp", "--precision.compute=bf16", "--text"})
                             .out);
  std::ofstream(front.file("step.txt")) << printed.out;
  EXPECT_EQ(front.run({"plan", "step", "--check", front.file("step.txt")}).code, 0);
  EXPECT_EQ(front.run({"plan", "step", "--check", front.file("step.txt"), "--gpu", "h200"}).code, 2);
}

/// Numbers of actions that begin a line of a table.
std::vector<std::string> rows_of(const std::string& text) {
  std::vector<std::string> rows;
  for (const std::string& line : split(text, '\n')) {
    const size_t first = line.find_first_not_of(' ');
    const bool numbered = first != std::string::npos && line[first] >= '0' && line[first] <= '9';
    if (numbered) rows.push_back(line);
  }
  return rows;
}

std::vector<nlohmann::json> actions_of(const nlohmann::json& document) {
  std::vector<nlohmann::json> actions;
  for (const auto& pass : document["passes"])
    actions.insert(actions.end(), pass["actions"].begin(), pass["actions"].end());
  return actions;
}

TEST(PlanStep, HasALineForEveryAction) {
  const FrontProcess front;
  const std::string out = front.run(step(kTiny)).out;
  const auto actions = actions_of(front.run(step(with(kTiny, {"--json"}))).json());
  const auto rows = rows_of(out);
  ASSERT_EQ(rows.size(), actions.size()) << out;
  for (size_t at = 0; at < rows.size(); ++at) {
    const auto& action = actions[at];
    EXPECT_EQ(action["action"], at);
    for (const char* key : {"lane", "kind", "unit"})
      EXPECT_TRUE(contains(rows[at], action[key].get<std::string>())) << rows[at];
    const auto held = action["held_bytes"]["total"].get<double>();
    EXPECT_TRUE(contains(rows[at], format_bytes(held))) << rows[at];
    EXPECT_TRUE(contains(rows[at], format_bytes(action["held_bytes_after"].get<double>()))) << rows[at];
  }
  EXPECT_TRUE(contains(out, "CUDA graphs  no: training runs on the CPU")) << out;
}

TEST(PlanStep, AddsUpWhatItLists) {
  const FrontProcess front;
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
    const auto json = front
                          .run(step({"-n", "4", "--model.preset=gpt-tiny", "--json",
                                     fmt::format("--parallel.policy={}", policy)}))
                          .json();
    int64_t sent = 0, most = 0, most_at = -1;
    for (const auto& action : actions_of(json)) {
      sent += action["sent_bytes"].get<int64_t>();
      int64_t total = 0;
      for (const auto& [role, bytes] : action["held_bytes"].items()) {
        if (role != "total") total += bytes.get<int64_t>();
      }
      EXPECT_EQ(total, action["held_bytes"]["total"]);
      EXPECT_LE(action["held_bytes_after"], total);
      if (total > most) most = total, most_at = action["action"];
    }
    EXPECT_EQ(json["sent_bytes_per_step"]["total"], sent) << policy;
    EXPECT_EQ(json["peak"]["action"], most_at) << policy;
    EXPECT_EQ(json["peak"]["held_bytes"]["total"], most) << policy;
  }
}

TEST(PlanStep, SaysWhatHooksSendWhereAFormulaTells) {
  const FrontProcess front;
  const auto of_hook = [&](const char* hook, const char* policy = "ddp") {
    return step({"-n", "4", "--model.preset=gpt-tiny", fmt::format("--parallel.policy={}", policy),
                 fmt::format("--parallel.comm_hook={}", hook)});
  };
  const auto sent = [&](const char* hook) {
    return front.run(with(of_hook(hook), {"--json"})).json()["sent_bytes_per_step"];
  };
  const auto plain = sent("none");
  const auto gradients = plain["gradients"].get<int64_t>();
  EXPECT_EQ(sent("fp16")["gradients"], gradients / 4 * 3) << "half of it is the sum that ddp gathers";
  EXPECT_EQ(sent("local_sgd")["parameters"], gradients);
  EXPECT_EQ(sent("local_sgd")["gradients"], 0);
  EXPECT_TRUE(sent("topk")["gradients"].is_null());
  EXPECT_TRUE(sent("topk")["total"].is_null());
  EXPECT_TRUE(contains(front.run(of_hook("local_sgd")).out, "(every 8 steps)"));
  EXPECT_TRUE(contains(front.run(of_hook("topk", "zero3")).out, "gradients - ("));
}

TEST(PlanStep, KeepsBetweenStepsWhatADryRunPredicts) {
  const FrontProcess front;
  const auto dry = front.run(with({"train", "--device=cpu", "--dry-run", "--json"}, kTiny)).json();
  const auto json = front.run(step(with(kTiny, {"--json"}))).json();
  int64_t kept = 0;
  for (const auto& buffer : json["buffers"]) {
    const bool counts = buffer["from"].is_null() || buffer["role"] == "reduced";
    if (counts && buffer["part_of"].is_null()) kept += buffer["bytes"].get<int64_t>();
  }
  const auto& predicted = dry["peak_bytes_per_rank"];
  EXPECT_EQ(kept, dry["state_bytes_per_rank"]["total"]);
  EXPECT_LE(json["peak"]["held_bytes"]["total"], predicted["kept"].get<int64_t>() +
                                                     predicted["gathered"].get<int64_t>() +
                                                     predicted["activations"].get<int64_t>());
}

TEST(PlanStep, OneMicroBatchStandsForMore) {
  const FrontProcess front;
  const Words words = {"-n", "2", "--model.preset=gpt-tiny", "--parallel.policy=fsdp",
                       "--train.micro_batch=1"};
  const auto sent = [&](int64_t micro_batches) {
    const std::string batch = fmt::format("--train.global_batch={}", 2 * micro_batches);
    const auto json = front.run(step(with(words, {batch, "--json"}))).json();
    EXPECT_EQ(json["micro_batches"], micro_batches);
    return json["sent_bytes_per_step"]["parameters"].get<int64_t>();
  };
  EXPECT_EQ(sent(8) - sent(3), 5 * (sent(3) - sent(2)));
  const std::string out = front.run(step(with(words, {"--train.global_batch=16"}))).out;
  EXPECT_TRUE(contains(out, "8 per step, of which 1 stands for 1 to 6 and 2 is the last")) << out;
}

TEST(PlanStep, FoldsWhatRepeats) {
  const FrontProcess front;
  const Words words = {"-n",
                       "2",
                       "--model.preset=gpt2-124m",
                       "--parallel.policy=fsdp",
                       "--train.micro_batch=1",
                       "--train.global_batch=8"};
  const std::string folded = front.run(step(words)).out;
  const std::string all = front.run(step(with(words, {"--all"}))).out;
  const auto actions = actions_of(front.run(step(with(words, {"--json"}))).json());
  EXPECT_EQ(rows_of(all).size(), actions.size());
  EXPECT_LT(rows_of(folded).size(), rows_of(all).size() / 3);
  EXPECT_TRUE(contains(folded, "as 2 to 4  ")) << folded;
  EXPECT_TRUE(contains(folded, "transformer.h.1 to 10")) << folded;
  EXPECT_FALSE(contains(all, " as 2 to 4")) << all;
  const auto marked = [](const std::string& text) {
    std::string number;
    for (const std::string& row : rows_of(text)) {
      if (row.ends_with("<- peak")) number += row.substr(0, row.find("  ", row.find_first_not_of(' ')));
    }
    return number.substr(number.find_last_of(' ') + 1);
  };
  EXPECT_FALSE(marked(all).empty());
  EXPECT_EQ(marked(folded), marked(all)) << "the peak is a row of its own";
}

/// Every action is in the tables once: by itself, in a stretch of a pass, or in a pass that is like another.
void expect_all_actions(const StepView& view) {
  size_t next = 0;
  for (const std::string& line : split(to_text(view, false), '\n')) {
    size_t begin = 0, end = 0;
    const size_t colon = line.find("micro-batch ") == std::string::npos ? 0 : line.find(": ");
    if (colon == std::string::npos) continue;
    const int read = std::sscanf(line.c_str() + (colon > 0 ? colon + 1 : 0), " %zu to %zu", &begin, &end);
    if (read < 1) continue;
    EXPECT_EQ(begin, next) << line;
    next = (read == 2 ? end : begin) + 1;
  }
  EXPECT_EQ(next, view.program.actions.size());
}

TEST(PlanStep, FoldedLinesCoverEveryActionOnce) {
  for (const plan::Device device : {plan::Device::kCpu, plan::Device::kCuda}) {
    for (const plan::Policy& policy : plan::policies()) {
      for (const int64_t micro_batches : {1, 2, 3, 8}) {
        SCOPED_TRACE(fmt::format("{} on {}, {} micro-batches", policy.label(), device, micro_batches));
        plan::Config config;
        config.model = plan::find_preset("gpt2-124m").model;
        config.parallel.policy = policy.name;
        config.parallel.sharding = policy.sharding;
        config.parallel.dp_replicate = policy.hybrid ? 2 : 1;
        config.train.micro_batch = 1;
        config.train.global_batch = 4 * micro_batches;
        const StepView view = planned_step(plan_run(config, device, 4));
        EXPECT_LT(split(to_text(view, false), '\n').size(), 160u);
        expect_all_actions(view);
      }
    }
  }
}

TEST(PlanStep, OfAPipelineIsTheProgramOfTheRank) {
  const FrontProcess front;
  const Words pipeline = {"-n", "2", "--model.preset=gpt-tiny", "--parallel.pp=2",
                          "--pipeline.micro_batches=4"};
  for (const int64_t rank : {0, 1}) {
    const Words mine = with(pipeline, {"--rank", std::to_string(rank)});
    const Outcome shown = front.run(step(mine));
    EXPECT_EQ(shown.code, 0) << shown.err;
    const std::string where = fmt::format("1f1b, rank {} of 2 with stage {} of 2", rank, rank);
    for (const std::string& words : {where, std::string("recv"), std::string("between stages")})
      EXPECT_TRUE(contains(shown.out, words)) << words << " in " << shown.out;
    const auto json = front.run(step(with(mine, {"--json"}))).json();
    // 4 micro-batches of 4 sequences of 128 tokens of width 128, fp32, each way.
    EXPECT_EQ(json["sent_bytes_per_step"]["boundaries"], 4 * (4 * 128 * 128 * 4));
    EXPECT_TRUE(contains(json["recording_obstacle"].get<std::string>(), "communicate")) << json;
  }
}

/// The program keeps for backward what the run will keep, which memory.recompute=auto decides.
TEST(PlanStep, OfAPipelineKeepsWhatTheRunWillKeep) {
  plan::Config config;
  config.model = plan::find_preset("llama-1b").model;
  config.precision.compute = plan::Dtype::kBf16;
  config.parallel.pp = 2;
  config.memory.recompute = plan::Recompute::kAuto;
  const RunPlan by_itself = plan_run(config, plan::Device::kCuda, 2);
  EXPECT_EQ(by_itself.config.memory.recompute, plan::Recompute::kCheap);
  config.memory.recompute = plan::Recompute::kCheap;
  const RunPlan cheap = plan_run(config, plan::Device::kCuda, 2);
  EXPECT_EQ(planned_texts(by_itself), planned_texts(cheap));
  config.memory.recompute = plan::Recompute::kNone;
  EXPECT_NE(planned_texts(by_itself), planned_texts(plan_run(config, plan::Device::kCuda, 2)));
  for (const int64_t rank : {0, 1})
    EXPECT_TRUE(planned_step(by_itself, rank).program == planned_step(cheap, rank).program);
}

TEST(PlanStep, FitsNarrowTerminals) {
  plan::Config config;
  config.model = plan::find_preset("gpt-tiny").model;
  config.parallel.policy = plan::PolicyName::kFsdp;
  const StepView view = planned_step(plan_run(config, plan::Device::kCpu, 2), 0);
  for (const int64_t columns : {60, 80, 120}) {
    const std::string text = to_text(view, false, columns);
    for (const std::string& line : split(text, '\n'))
      EXPECT_LE(line.size(), static_cast<size_t>(columns)) << line;
    EXPECT_TRUE(contains(text, "<- peak")) << text;
  }
  EXPECT_TRUE(contains(to_text(view, false, 120), "total     after\n"));
  EXPECT_FALSE(contains(to_text(view, false, 80), "after\n")) << "there is room for less";
}

TEST(PlanStep, RangesOfRanksMakeUpEachUnit) {
  const FrontProcess front;
  std::vector<int64_t> next;
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto json = front
                          .run(step({"-n", "4", "--model.preset=gpt-tiny", "--parallel.policy=fsdp", "--rank",
                                     std::to_string(rank), "--json"}))
                          .json();
    next.resize(json["units"].size());
    for (size_t unit = 0; unit < next.size(); ++unit) {
      const auto& row = json["units"][unit];
      EXPECT_EQ(row["keeps"], row["updates"]);
      EXPECT_EQ(row["keeps"][0], next[unit]);
      next[unit] = row["keeps"][1];
      if (rank == 3) {
        EXPECT_EQ(row["elements"], next[unit]);
      }
    }
  }
  const auto zero =
      front.run(step({"-n", "4", "--parallel.policy=zero1", "--rank", "1", "--json"})).json()["units"][0];
  EXPECT_EQ(zero["keeps"], nlohmann::json({0, zero["elements"]}));
  EXPECT_EQ(zero["updates"][0].get<int64_t>() * 4, zero["elements"]);
}

class PlanStepCheck : public ::testing::Test {
 protected:
  PlanStepCheck() : text_(front_.run(step(with(kTiny, {"--text"}))).out) {}
  Outcome check(const std::string& text, const Words& more = {}) const {
    const std::string path = front_.file("mine.txt");
    std::ofstream(path) << text;
    return front_.run(with({"plan", "step", "--check", path}, more));
  }
  std::string replaced(const std::string& from, const std::string& to) const {
    std::string damaged = text_;
    const size_t at = damaged.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return damaged.replace(at, from.size(), to);
  }

  /// Of an action, with its newline.
  std::string line_of(int64_t action) const {
    for (const std::string& line : split(text_, '\n')) {
      if (line.starts_with(fmt::format("{:>5} ", action))) return line + "\n";
    }
    ADD_FAILURE() << "there is no action " << action;
    return "";
  }

  const FrontProcess front_;
  const std::string text_;
};

TEST_F(PlanStepCheck, ReadsWhatItWrites) {
  const auto planned = front_.run(step(with(kTiny, {"--json"}))).json();
  const auto read = check(text_, {"--json"}).json();
  for (const char* key : {"units", "buffers", "passes", "peak", "sent_bytes_per_step", "micro_batches"})
    EXPECT_EQ(read[key], planned[key]) << key;
  EXPECT_EQ(check(text_, {"--text"}).out, text_);
  EXPECT_EQ(check(text_).code, 0);
}

TEST_F(PlanStepCheck, SaysWhichLineCannotBeRead) {
  for (const auto& [text, said] :
       {std::pair<std::string, std::string>{replaced("forward", "foreword"),
                                            "'foreword' is not one of forward"},
        {replaced("trainable", "trainble"), "'trainble' is neither trainable nor frozen"},
        {replaced("         197,632 ", "        -197,632 "), "'-197632' is not a number of 0 or more"},
        {replaced("    2 unshard", "    3 unshard"), "action 3 is used already"},
        {replaced("from 0 to 36", "from 0 to 99"), "there is no action 99"},
        {replaced(line_of(14), ""), "there is no action 14"},
        {"hello", "an action comes before"}}) {
    const Outcome outcome = check(text);
    EXPECT_EQ(outcome.code, 2) << said;
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(contains(outcome.err, said)) << outcome.err;
    EXPECT_TRUE(contains(outcome.err, "line ")) << outcome.err;
  }
  EXPECT_EQ(check("").code, 2);
  EXPECT_TRUE(contains(check("# nothing\n").err, "has no actions"));
}

TEST_F(PlanStepCheck, SaysWhichActionCannotBe) {
  for (const auto& [text, said] : {
           std::pair<std::string, std::string>{replaced("from 13 to 15", "from 14 to 15"),
                                               "action 13, backward of transformer.h.3 in micro-batch 0: the "
                                               "gradients of transformer.h.3 have no "
                                               "memory here"},
           {replaced("from 3 to 28", "from 3 to 17"),
            "action 28, backward of transformer.h.0 in micro-batch 0: the activations of transformer.h.0 "
            "have no"},
           {replaced(line_of(13) + line_of(14), line_of(14) + line_of(13)),
            "action 13, reduce of transformer.h.3 in micro-batch 0: its gradients are not complete"},
           {replaced(line_of(37), ""), "transformer.h.0 is never updated"},
           {replaced("update          root           ", "update          *              "),
            "units are updated one by one"},
           {replaced("update          root           ", "update          transformer.h.1"),
            "action 38, update of transformer.h.1: it occurs twice"},
       }) {
    const Outcome outcome = check(text);
    EXPECT_EQ(outcome.code, 1) << said;
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(contains(outcome.err, said)) << outcome.err;
    EXPECT_FALSE(contains(outcome.err, ".cpp")) << outcome.err;
  }
}

TEST(PlanStep, RefusesWhatCannotBe) {
  const FrontProcess front;
  struct Mistake {
    Words words;
    std::string said;
    int code = 2;
  };
  const Mistake mistakes[] = {
      {{"--parallel.policy=zero9"}, "choose one of ddp, zero1"},
      {{"--modl.preset=gpt-tiny"}, "did you mean 'model.preset'?"},
      {{"--lr=1"}, "did you mean '--optim.lr'?"},
      {{"--alll"}, "did you mean '--all'?"},
      {{"-n", "0"}, "must be 1 or more"},
      {{"-n", "3", "--train.global_batch=8"}, "global_batch"},
      {{"--rank", "2", "-n", "2"}, "use 0 to 1"},
      {{"--rank", "-1"}, "use 0 to 1"},
      {{"--text", "--json"}, "excludes"},
      {{"/no/such.yaml"}, "/no/such.yaml"},
  };
  for (const Mistake& mistake : mistakes) {
    const Outcome outcome = front.run(step(mistake.words));
    EXPECT_EQ(outcome.code, mistake.code) << join(mistake.words, " ") << outcome.err;
    EXPECT_EQ(outcome.out, "") << join(mistake.words, " ");
    EXPECT_TRUE(contains(outcome.err, mistake.said)) << outcome.err;
  }
  const Mistake checks[] = {{{"--check", "/no/such"}, "/no/such does not exist"},
                            {{"--check", ""}, "--check has an empty value"},
                            {{"--check", "a", "-n", "2"}, "excludes"},
                            {{"--check", "a", "b.yaml"}, "excludes"},
                            {{"--check", "a", "--train.steps=3"}, "train.steps=3"}};
  for (const Mistake& mistake : checks) {
    const Outcome outcome = front.run(with({"plan", "step"}, mistake.words));
    EXPECT_EQ(outcome.code, mistake.code) << join(mistake.words, " ") << outcome.err;
    EXPECT_TRUE(contains(outcome.err, mistake.said)) << outcome.err;
  }
}

}  // namespace
}  // namespace trireme::cli
