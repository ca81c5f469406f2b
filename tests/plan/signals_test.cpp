#include "trireme/plan/signals.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

using Workers = std::vector<int64_t>;

Signals read(const std::string& text) {
  return read_signals(text, "s.yaml");
}

/// The text's message; empty: it is read.
std::string refusal(const std::string& text) {
  try {
    read(text);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return {};
}

/// A stage on each of the lists.
std::string stages_on(const std::vector<std::string>& lists) {
  std::string text;
  for (size_t stage = 0; stage < lists.size(); ++stage)
    text += fmt::format("pp_stage{}:\n  workers: {}\n", stage, lists[stage]);
  return text;
}

/// The three signals that the document shows.
TEST(Signals, ReadsTheDocumentsEntries) {
  const Signals signals = read(R"(
# Pipeline stage 0 - all layers on GPUs 0-1
pp_stage0:
  shard:
    axis: 0
    workers: [0, 1]
pp_stage0_colpar:
  shard:
    axis: 1
    workers: [0, 1]
pp_stage0_rowpar:
  shard: {axis: 0, workers: [0, 1]}
)");
  ASSERT_EQ(signals.stages.size(), 1u);
  const SignalStage& stage = signals.stages.front();
  EXPECT_EQ(stage.all.workers, (Workers{0, 1}));
  EXPECT_EQ(stage.all.placement, TensorPlacement::shard(0));
  EXPECT_EQ(stage.column.placement, TensorPlacement::shard(1));
  EXPECT_EQ(stage.row.placement, TensorPlacement::shard(0));
  EXPECT_EQ(stage.column.at, "s.yaml:7:1");
  EXPECT_EQ(signals.workers(), 2);
  EXPECT_TRUE(signals.notes.empty());
}

TEST(Signals, ProductsWithoutAnEntryHaveTheStagesWorkers) {
  const Signals signals = read("pp_stage0:\n  workers: [1, 0]\npp_stage0_colpar:\n  compile: true\n");
  const Signal *column = signals.find("pp_stage0_colpar"), *row = signals.find("pp_stage0_rowpar");
  ASSERT_TRUE(column != nullptr && row != nullptr);
  EXPECT_EQ(column->workers, (Workers{1, 0}));
  EXPECT_TRUE(column->compile);
  EXPECT_EQ(column->placement, TensorPlacement::shard(1));
  EXPECT_EQ(row->workers, (Workers{1, 0}));
  EXPECT_FALSE(row->compile);
  EXPECT_EQ(row->placement, TensorPlacement::shard(0));
  EXPECT_EQ(signals.find("pp_stage1_rowpar"), nullptr);
}

TEST(Signals, ArePartOfAMeshWhereStagesAreAlike) {
  const Signals signals = read(stages_on({"[0, 1]", "[2, 3]", "[4, 5]", "[6, 7]"}));
  EXPECT_EQ(mesh_obstacle(signals), "");
  EXPECT_EQ(config_keys(signals, 2), (std::vector<std::string>{"parallel.tp=2", "parallel.pp=4"}));
  ASSERT_EQ(signals.boundaries.size(), 3u);
  EXPECT_EQ(signals.boundaries[1].name, "stage1_to_stage2");
  EXPECT_FALSE(signals.boundaries[1].declared);
  const std::string uneven = mesh_obstacle(read(stages_on({"[0, 1]", "[2]"})));
  EXPECT_TRUE(uneven.find("pp_stage0 has 2 workers and pp_stage1 has 1") != std::string::npos) << uneven;
  EXPECT_NE(mesh_obstacle(read("mlp:\n  workers: [0, 1]\n")), "");
}

TEST(Signals, AreNoMeshWhereWorkersAreInAnotherOrderThanRanks) {
  EXPECT_EQ(mesh_obstacle(read(stages_on({"[2, 3]", "[0, 1]"}))),
            "worker 2 is where a mesh has rank 0; list workers 0, 1, 2, ... from stage to stage");
  EXPECT_EQ(mesh_obstacle(read(stages_on({"[1, 0]"}))),
            "worker 1 is where a mesh has rank 0; list workers 0, 1, 2, ... from stage to stage");
}

TEST(Signals, EqualListsAreChunksOfOneRank) {
  const Signals there_and_back = read(stages_on({"[0]", "[1]", "[1]", "[0]"}));
  EXPECT_EQ(there_and_back.placement, Placement::kV);
  EXPECT_EQ(there_and_back.chunks(), 2);
  EXPECT_EQ(config_keys(there_and_back, 1).back(), "pipeline.schedule=zb_v");
  const Signals again = read(stages_on({"[0]", "[1]", "[0]", "[1]", "[0]", "[1]"}));
  EXPECT_EQ(again.placement, Placement::kLoop);
  EXPECT_EQ(config_keys(again, 1),
            (std::vector<std::string>{"parallel.tp=1", "parallel.pp=2", "pipeline.schedule=interleaved_1f1b",
                                      "pipeline.chunks=3"}));
  const Signals one = read(stages_on({"[0, 1]", "[0, 1]", "[0, 1]"}));
  EXPECT_EQ(config_keys(one, 2), (std::vector<std::string>{"parallel.tp=2", "parallel.pp=1"}));
}

TEST(Signals, BoundariesAreCalledByStages) {
  const std::string stages = stages_on({"[0]", "[1]", "[2]"});
  const Signals signals = read(stages + "stage0_to_stage1:\npp_stage1_to_pp_stage2:\n  workers: [2]\n");
  EXPECT_TRUE(signals.boundaries[0].declared);
  EXPECT_EQ(signals.boundaries[1].name, "pp_stage1_to_pp_stage2");
  EXPECT_EQ(signals.boundaries[1].from, 1);
  EXPECT_TRUE(signals.notes.empty());
}

TEST(Signals, OtherNamesAreScopesAndNoted) {
  const Signals signals = read("embedding:\n  shard: {replicated: true}\nmlp_colpar:\n  workers: [0, 2]\n");
  ASSERT_EQ(signals.scopes().size(), 2u);
  EXPECT_EQ(signals.scopes()[0]->placement, TensorPlacement::replicate());
  EXPECT_EQ(signals.scopes()[0]->workers, (Workers{0, 2})) << "all that the file names";
  ASSERT_EQ(signals.notes.size(), 2u);
  EXPECT_TRUE(signals.notes[1].starts_with("s.yaml:3:1: 'mlp_colpar' is no stage")) << signals.notes[1];
  EXPECT_EQ(read("token_to_embedding:\n  workers: [0, 1]\n").scopes().size(), 1u);
  const Signals open = read("pp_stage0:\n  shard: {axis: 0}\npp_stage1:\n  workers: [0, 1]\n");
  ASSERT_EQ(open.notes.size(), 1u);
  EXPECT_TRUE(open.notes[0].find("'pp_stage0' has no workers of its own, so it has all: [0, 1]") !=
              std::string::npos)
      << open.notes[0];
  EXPECT_TRUE(read("").entries.empty());
  EXPECT_TRUE(read("# nothing\n").entries.empty());
}

struct RefusedFile {
  std::string text, said;
};

TEST(Signals, RefusesWhatCannotBeMeantAndNamesTheLine) {
  const std::string two = stages_on({"[0, 1]", "[2, 3]"});
  const RefusedFile cases[] = {
      {"- a\n", "s.yaml:1:1: signals are a mapping"},
      {"a b:\n", "s.yaml:1:1: the name of a signal must be one word"},
      {"a: 3\n", "'a' has no keys"},
      {"a: {shard: {axsi: 1}}\n", "s.yaml:1:13: unknown key 'axsi' of a.shard, did you mean 'axis'?"},
      {"a:\n  wokers: [0]\n", "s.yaml:2:3: unknown key 'wokers' of a, did you mean 'workers'?"},
      {"a:\n  workers: [0]\n  workers: [1]\n", "'workers' of a is given twice"},
      {"a:\n  workers: [0]\n  shard: {workers: [0]}\n", "workers of a are given twice"},
      {"a:\n  workers: 3\n", "s.yaml:2:3: workers of a are no list"},
      {"a:\n  workers: []\n", "no list"},
      {"a:\n  workers: [0, -1]\n", "s.yaml:2:16: '-1' is no worker"},
      {"a:\n  workers: [0, 1e3]\n", "'1e3' is no worker"},
      {"a:\n  workers: [65536]\n", "'65536' is no worker"},
      {"a:\n  workers: [0, 1, 0]\n", "s.yaml:2:19: worker 0 of a is named twice"},
      {"a: {shard: {axis: -1}}\n", "axis '-1' is no dimension"},
      {"a: {shard: {axis: x}}\n", "axis 'x' is no dimension"},
      {"a: {shard: {axis: 0, replicated: true}}\n", "is replicated and has the axis 0"},
      {"a: {compile: often}\n", "compile is neither true nor false"},
      {"a: {backward: b}\n", "s.yaml:1:1: backward of a is 'b', which is no signal"},
      {"a:\n  workers: [0]\na:\n  workers: [1]\n", "s.yaml:3:1: 'a' is given twice, also in s.yaml:1:1"},
      {"pp_stage0:\nstage0:\n  workers: [0]\n", "are both stage 0"},
      {"pp_stage1:\n  workers: [0]\n", "there is 'pp_stage1', but no stage 0"},
      {"pp_stage0:\n  compile: true\n", "stage 'pp_stage0' has no workers"},
      {"pp_stage0: {shard: {axis: 1, workers: [0, 1]}}\n", "split by rows; use axis: 0"},
      {"pp_stage0: {shard: {replicated: true, workers: [0, 1]}}\n", "on every worker"},
      {stages_on({"[0, 1]", "[1, 2]"}), "s.yaml:3:1: worker 1 is in 'pp_stage1', [1, 2], and in 'pp_stage0'"},
      {stages_on({"[0, 1]", "[1, 0]"}), "in the same order"},
      {stages_on({"[0]", "[2]"}), "worker 1 is in no stage, but 'pp_stage1' has worker 2"},
      {stages_on({"[0]", "[1]", "[1]"}), "in an order that no schedule has"},
      {stages_on({"[0]", "[0]", "[1]", "[1]"}), "in an order that no schedule has"},
      {two + "pp_stage0_colpar:\n  workers: [2, 3]\n", "pp_stage0_colpar has workers [2, 3], but pp_stage0"},
      {two + "pp_stage0_colpar: {shard: {axis: 0}}\n", "must split weights along axis 1"},
      {two + "pp_stage0_rowpar: {shard: {replicated: true}}\n", "must split weights along axis 0"},
      {two + "pp_stag0_to_stage1:\n",
       "boundary to or from 'pp_stag0', which is no stage, did you mean 'pp_stage0'?"},
      {two + "stage0_to_stage1: {shard: {axis: 1, workers: [2, 3]}}\n", "split by rows; leave out axis"},
      {two + "stage0_to_stage1: {replicated: true}\n", "split by rows; leave out axis"},
      {"a: {replicated: true, shard: {replicated: false}}\n", "replicated of a is given twice"},
      {"a//b:\n", "without '//'"},
      {two + "stage1_to_stage0:\n", "leads from stage 1 to stage 0"},
      {two + "stage0_to_stage1:\npp_stage0_to_stage1:\n", "is the boundary that 'stage0_to_stage1' is"},
      {two + "stage0_to_stage1:\n  workers: [0, 1]\n", "leads to workers [0, 1], but pp_stage1"},
      {two + "pp_stage2_colpar:\n", "belongs to a stage 'pp_stage2' that is not there, did you mean"},
      {two + "pp_stage0_colpar: {backward: pp_stage1}\n", "gradients of pp_stage0_colpar are to follow"},
      {"a: 'b\n", "not valid YAML"},
      {"a:\n\tworkers: [0]\n", "s.yaml:2: the line is indented with a tab"},
  };
  for (const RefusedFile& one : cases) {
    const std::string message = refusal(one.text);
    EXPECT_TRUE(message.find(one.said) != std::string::npos) << one.text << "\n" << message;
    EXPECT_TRUE(message.starts_with("[plan.signals] ")) << message;
  }
}

TEST(Signals, GradientsMayFollowAnotherSignal) {
  const Signals signals = read(stages_on({"[0, 1]"}) + "pp_stage0_colpar: {backward: pp_stage0_rowpar}\n");
  EXPECT_EQ(signals.stages.front().column.backward, "pp_stage0_rowpar");
}

}  // namespace
}  // namespace trireme::plan
