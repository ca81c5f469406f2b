// trireme plan mesh and trireme plan placements: who is where, which meshes there are, where parameters are.
#include <gtest/gtest.h>

#include <set>

#include "tests/cli/front_process.h"

namespace trireme::cli {
namespace {

const std::string kDemo = TRIREME_SOURCE "/configs/mini-gpt-tp2-pp4.yaml";

TEST(PlanMesh, SaysWhoIsWhere) {
  const FrontProcess front;
  const Words words = {"plan", "mesh", kDemo, "-n", "8", "--device=cpu"};
  const Outcome text = front.run(words);
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "pp=4 tp=2")) << text.out;
  EXPECT_TRUE(contains(text.out, "3: transformer.h.6 to head")) << text.out;
  EXPECT_TRUE(contains(text.out, "0 1 | 2 3 | 4 5 | 6 7")) << text.out;
  EXPECT_TRUE(contains(text.out, "0 2 4 6 | 1 3 5 7")) << text.out;
  const auto json = front.run(words + Words{"--json"}).json();
  ASSERT_EQ(json["ranks"].size(), 8u);
  EXPECT_EQ(json["ranks"][5]["coordinates"]["pp"], 2);
  EXPECT_EQ(json["ranks"][5]["coordinates"]["tp"], 1);
  EXPECT_EQ(json["ranks"][5]["stages"], nlohmann::json::array({2}));
  EXPECT_EQ(json["ranks"][5]["sequences"], nlohmann::json::array({0, 32}));
  EXPECT_EQ(json["groups"].size(), 2u);
}

TEST(PlanMesh, SaysWhatRanksRead) {
  const auto json = FrontProcess()
                        .run({"plan", "mesh", "-n", "8", "--device=cpu", "--model.preset=gpt-tiny",
                              "--parallel.cp=2", "--parallel.tp=2", "--train.global_batch=8", "--json"})
                        .json();
  const auto& rank = json["ranks"][6];  // dp 1, cp 1, tp 0
  EXPECT_EQ(rank["dp_rank"], 1);
  EXPECT_EQ(rank["sequences"], nlohmann::json::array({4, 8}));
  EXPECT_EQ(rank["tokens"], nlohmann::json::parse("[[64, 128]]"));
  EXPECT_EQ(json["ranks"][7]["sequences"], rank["sequences"]);
}

TEST(PlanMesh, SaysWhichTokensRanksOfARingRead) {
  const FrontProcess front;
  const Words words = {"plan",
                       "mesh",
                       "-n",
                       "2",
                       "--device=cpu",
                       "--model.preset=gpt-tiny",
                       "--parallel.cp=2",
                       "--parallel.cp_kind=ring"};
  const auto json = front.run(words + Words{"--json"}).json();
  EXPECT_EQ(json["cp_kind"], "ring");
  EXPECT_EQ(json["ranks"][0]["tokens"], nlohmann::json::parse("[[0, 32], [96, 128]]"));
  EXPECT_EQ(json["ranks"][1]["tokens"], nlohmann::json::parse("[[32, 64], [64, 96]]"));
  const Outcome text = front.run(words);
  EXPECT_TRUE(contains(text.out, "tokens 0 to 31 and 96 to 127 of each")) << text.out;
  EXPECT_TRUE(contains(text.out, "keys and values go around")) << text.out;
}

TEST(PlanMesh, ComparesAllMeshesAndSaysWhyOthersAreRefused) {
  const FrontProcess front;
  const Words words = {"plan", "mesh", kDemo, "-n", "8", "--device=cpu", "--model.n_heads=4", "--all"};
  const Outcome text = front.run(words);
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "refused, because")) << text.out;
  EXPECT_TRUE(contains(text.out, "8 ranks cannot share 4 heads")) << text.out;
  const auto json = front.run(words + Words{"--json"}).json();
  EXPECT_EQ(json["meshes"].size(), 20u);
  for (const auto& mesh : json["meshes"]) {
    const int64_t ranks = mesh["pp"].get<int64_t>() * mesh["dp"].get<int64_t>() * mesh["cp"].get<int64_t>() *
                          mesh["tp"].get<int64_t>();
    EXPECT_EQ(ranks, 8);
    EXPECT_EQ(mesh["works"], !mesh.contains("obstacle"));
  }
  // The config's own mesh does not limit the ranks.
  EXPECT_EQ(front.run({"plan", "mesh", kDemo, "-n", "4", "--device=cpu", "--all"}).code, 0);
  EXPECT_EQ(front.run({"plan", "mesh", kDemo, "-n", "4", "--device=cpu"}).code, 2);
}

TEST(PlanMesh, TakesGpusAndLinksThatAreElsewhere) {
  const FrontProcess front;
  const auto json = front
                        .run({"plan", "mesh", "-n", "16", "--gpu", "l4", "--all", "--model.preset=llama-8b",
                              "--precision.compute=bf16", "--data.seq_len=2048", "--train.global_batch=64",
                              "--train.micro_batch=1", "--tflops", "600", "--links", "400,25", "--host-ranks",
                              "4", "--json"})
                        .json();
  EXPECT_EQ(json["device"], "cuda");
  EXPECT_EQ(json["assumed"]["ranks_per_host"], 4);
  EXPECT_EQ(json["assumed"]["bytes_per_s_between_hosts"], 25e9);
  std::set<bool> fits;
  for (const auto& mesh : json["meshes"]) {
    if (mesh["works"]) fits.insert(mesh["fits"].get<bool>());
  }
  EXPECT_EQ(fits.size(), 2u);  // some meshes are too large for one GPU
  EXPECT_EQ(front.run({"plan", "mesh", "-n", "2", "--links", "3"}).code, 2);
}

TEST(PlanPlacements, ListsEveryParameterOfEveryStage) {
  const FrontProcess front;
  const Words words = {"plan", "placements", kDemo, "-n", "8", "--device=cpu"};
  const Outcome text = front.run(words);
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(contains(text.out, "dim 1: 0 to 63 of each of 3")) << text.out;
  EXPECT_TRUE(contains(text.out, "replicated")) << text.out;
  const auto json = front.run(words + Words{"--json"}).json();
  ASSERT_EQ(json["ranks"].size(), 4u);
  std::set<std::string> names;
  for (const auto& rank : json["ranks"]) {
    int64_t bytes = 0;
    for (const auto& param : rank["parameters"]) {
      names.insert(param["name"].get<std::string>());
      bytes += param["bytes"].get<int64_t>();
    }
    EXPECT_EQ(bytes, rank["totals"]["bytes"]);
  }
  EXPECT_EQ(names.size(), 2u + 8 * 12 + 2);
}

/// Where a run goes on without FP8, its bytes are those of bf16.
TEST(PlanPlacements, CountInThePrecisionOfTheRun) {
  const auto ranks = [](const Words& fp8) {
    return FrontProcess()
        .run(Words{"plan", "placements", "-n", "2", "--device=cpu", "--model.preset=llama-tiny",
                   "--precision.compute=bf16", "--json"} +
             fp8)
        .json()["ranks"];
  };
  EXPECT_EQ(ranks({"--precision.fp8=tensorwise", "--precision.fp8_fallback=bf16"}),
            ranks({"--precision.fp8=off"}));
}

TEST(PlanPlacements, ShowsOneRank) {
  const FrontProcess front;
  const auto json =
      front.run({"plan", "placements", kDemo, "-n", "8", "--device=cpu", "--rank", "3", "--json"}).json();
  ASSERT_EQ(json["ranks"].size(), 1u);
  EXPECT_EQ(json["ranks"][0]["rank"], 3);
  for (const auto& param : json["ranks"][0]["parameters"]) {
    EXPECT_EQ(param["stage"], 1);
    if (param["placement"] == "shard") {
      EXPECT_GT(param["range"][0].get<int64_t>(), 0) << param["name"];
    }
  }
  const Outcome outside = front.run({"plan", "placements", kDemo, "-n", "8", "--device=cpu", "--rank", "8"});
  EXPECT_EQ(outside.code, 2);
  EXPECT_TRUE(contains(outside.err, "use 0 to 7")) << outside.err;
}

}  // namespace
}  // namespace trireme::cli
