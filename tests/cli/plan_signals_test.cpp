// trireme plan signals: what a file of signals makes of a model, beside plan placements of the mesh that it
// is.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/cli/front_process.h"

namespace trireme::cli {
namespace {

const std::string kSignals = TRIREME_SOURCE "/configs/signals/",
                  kModel = TRIREME_SOURCE "/configs/mini-gpt-tp2-pp4.yaml";

std::string written(const FrontProcess& front, const std::string& text) {
  const std::string path = front.file("signals.yaml");
  std::ofstream(path) << text;
  return path;
}

/// What ranks of `plan placements` hold, and what the groups of `plan signals` do.
void expect_same_placements(const std::string& signals, const Words& mesh, int64_t ranks) {
  const FrontProcess front;
  const Words model = {"--config", kModel, "--device=cpu", "--json"};
  const Outcome asked = front.run(Words{"plan", "signals", signals} + model);
  ASSERT_EQ(asked.code, 0) << asked.err;
  const auto groups = asked.json()["groups"];
  const auto placed =
      front.run(Words{"plan", "placements", "-n", std::to_string(ranks)} + model + mesh).json()["ranks"];
  ASSERT_EQ(groups.size(), placed.size()) << signals;
  for (size_t place = 0; place < groups.size(); ++place) {
    EXPECT_EQ(groups[place]["parameters"], placed[place]["parameters"]) << signals << " " << place;
    EXPECT_EQ(groups[place]["totals"], placed[place]["totals"]) << signals << " " << place;
    EXPECT_EQ(groups[place]["worker"], placed[place]["rank"]) << signals << " " << place;
  }
}

TEST(PlanSignals, PlaceParametersAsTheMeshThatTheyAre) {
  expect_same_placements(kSignals + "tp2-pp4.yaml", {"--parallel.tp=2", "--parallel.pp=4"}, 8);
  expect_same_placements(kSignals + "tp4-pp2.yaml", {"--parallel.tp=4", "--parallel.pp=2"}, 8);
  expect_same_placements(kSignals + "tp2-zb-v.yaml",
                         {"--parallel.tp=2", "--parallel.pp=4", "--pipeline.schedule=zb_v"}, 8);
  const FrontProcess front;
  expect_same_placements(written(front, "pp_stage0:\n  workers: [0, 1]\n"),
                         {"--parallel.tp=2", "--parallel.pp=1"}, 2);
}

/// Without a config: 8 layers of 1024, dealt evenly, micro-batches of 4.
TEST(PlanSignals, TakeTheDocumentsModelByDefault) {
  const FrontProcess front;
  const Outcome text = front.run({"plan", "signals", kSignals + "tp2-pp4.yaml", "--device=cpu"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "-n 8 --parallel.tp=2 --parallel.pp=4")) << text.out;
  EXPECT_TRUE(contains(text.out, "root to transformer.h.1")) << text.out;
  EXPECT_TRUE(contains(text.out, "transformer.h.6 to head")) << text.out;
  const auto json =
      front.run({"plan", "signals", kSignals + "tp2-pp4.yaml", "--device=cpu", "--data.seq_len=64", "--json"})
          .json();
  EXPECT_EQ(json["keys"], nlohmann::json::array({"parallel.tp=2", "parallel.pp=4"}));
  ASSERT_EQ(json["boundaries"].size(), 3u);
  for (const auto& boundary : json["boundaries"]) {
    const int64_t bytes = 4 * 64 * 1024 * 4;  // micro-batch x tokens x width, in fp32
    EXPECT_EQ(boundary["activation_bytes"], bytes);
    EXPECT_EQ(boundary["gradient_bytes"], bytes);
    EXPECT_EQ(boundary["declared"], true);
  }
  // A block enters its cut layers twice and leaves them twice; half of the rows come from the other worker.
  const int64_t rows = 4 * 64 * 1024 * 4;
  int blocks = 0;
  for (const auto& group : json["groups"]) {
    for (const auto& one : group["tp"]) {
      if (!contains(one["unit"].get<std::string>(), "transformer.h.")) continue;
      if (one["pass"] == "gradients") continue;
      const bool forward = one["pass"] == "forward";
      EXPECT_EQ(one["all_gather_bytes"], (forward ? 2 : 4) * rows / 2) << one;
      EXPECT_EQ(one["sum_bytes"], 2 * rows / 2) << one;
      ++blocks;
    }
  }
  EXPECT_EQ(blocks, 8 * 2);
}

TEST(PlanSignals, ChunksStayWhereTheyTurn) {
  const auto json =
      FrontProcess()
          .run({"plan", "signals", kSignals + "tp2-zb-v.yaml", "--config", kModel, "--device=cpu", "--json"})
          .json();
  ASSERT_EQ(json["boundaries"].size(), 7u);
  for (const auto& boundary : json["boundaries"]) {
    const int64_t bytes = boundary["name"] == "stage3_to_stage4" ? 0 : 4 * 128 * 128 * 4;
    EXPECT_EQ(boundary["activation_bytes"], bytes) << boundary;
    EXPECT_EQ(boundary["gradient_bytes"], bytes) << boundary;
  }
}

TEST(PlanSignals, ShowOneWorkerAndLayersOfStagesThatDiffer) {
  const FrontProcess front;
  const auto worker = front
                          .run({"plan", "signals", kSignals + "tp2-pp4.yaml", "--worker", "3", "--config",
                                kModel, "--device=cpu", "--json"})
                          .json();
  const auto rank =
      front.run({"plan", "placements", kModel, "-n", "8", "--device=cpu", "--rank", "3", "--json"}).json();
  ASSERT_EQ(worker["groups"].size(), 1u);
  EXPECT_EQ(worker["groups"][0]["parameters"], rank["ranks"][0]["parameters"]);
  const std::string uneven = written(front, "pp_stage0:\n  workers: [0, 1]\npp_stage1:\n  workers: [2]\n");
  const Words model = {"--config", kModel, "--device=cpu", "--json"};
  const auto json = front.run(Words{"plan", "signals", uneven} + model).json();
  EXPECT_EQ(json["keys"], nlohmann::json::array());
  EXPECT_TRUE(contains(json["obstacle"].get<std::string>(), "pp_stage0 has 2 workers")) << json["obstacle"];
  ASSERT_EQ(json["groups"].size(), 2u);
  EXPECT_EQ(json["groups"][1]["parameters"][0]["copies"], 1);
  EXPECT_EQ(json["boundaries"][0]["activation_bytes"], 4 * 128 * 128 * 4);
}

TEST(PlanSignals, ScopesAloneAreNoMesh) {
  const FrontProcess front;
  const std::string scopes = written(front, "embedding:\n  shard: {axis: 1, workers: [0, 1]}\n");
  const Outcome text = front.run({"plan", "signals", scopes});
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "it has no stages")) << text.out;
  EXPECT_TRUE(contains(text.err, "'embedding' is no stage")) << text.err;
}

TEST(PlanSignals, RefusesWhatFilesCannotMean) {
  const FrontProcess front;
  const std::string file = kSignals + "tp2-pp4.yaml";
  const std::pair<Words, std::string> cases[] = {
      {{file, "--parallel.tp=4"}, "--parallel.tp is what"},
      {{file, "--worker", "8"}, "--worker 8 is none of the 8 workers"},
      {{file, "--device=cpu", "--pipeline.schedule=zb_v"}, "does not have 4 stages where"},
      {{kSignals + "tp4-pp2.yaml", "--device=cpu", "--model.n_heads=2", "--model.n_kv_heads=2"},
       "4 ranks cannot share 2 heads"},
      {{written(front, "pp_stage0:\n  wrkers: [0]\n")}, "signals.yaml:2:3: unknown key 'wrkers'"},
  };
  for (const auto& [words, said] : cases) {
    const Outcome outcome = front.run(Words{"plan", "signals"} + words);
    EXPECT_EQ(outcome.code, 2) << outcome.out;
    EXPECT_EQ(outcome.out, "");
    EXPECT_TRUE(contains(outcome.err, said)) << outcome.err;
  }
  EXPECT_EQ(front.run({"plan", "signals", front.file("none.yaml")}).code, 3);
}

}  // namespace
}  // namespace trireme::cli
