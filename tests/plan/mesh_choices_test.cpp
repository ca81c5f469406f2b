// All meshes of some ranks: which work, in which order they come, and numbers that can be had in another way.
#include "trireme/plan/mesh_choices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/plan/mesh_groups.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/presets.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

Config small_gpt() {
  Config config;
  config.model = complete(
      {.family = ModelFamily::kGpt2, .n_layers = 8, .d_model = 64, .n_heads = 8, .vocab_size = 256}, 128);
  config.data.seq_len = 128;
  config.train.global_batch = 32;
  config.train.micro_batch = 4;
  return config;
}

const MeshChoice& choice_at(const std::vector<MeshChoice>& choices, int64_t pp, int64_t cp, int64_t tp) {
  return *std::ranges::find_if(choices, [&](const MeshChoice& choice) {
    return choice.mesh.size(Axis::kPp) == pp && choice.mesh.size(Axis::kCp) == cp &&
           choice.mesh.size(Axis::kTp) == tp;
  });
}

std::vector<MeshChoice> choices_of(const Config& config, int64_t ranks, int64_t memory = 0) {
  return mesh_choices(config, ranks, Device::kCpu, usual_speed(Device::kCpu), memory);
}

TEST(MeshChoices, HaveEveryFactorisationOnce) {
  const std::vector<MeshChoice> choices = choices_of(small_gpt(), 8);
  std::set<MeshShape::Coordinates> seen;
  for (const MeshChoice& choice : choices) {
    EXPECT_EQ(choice.mesh.world_size(), 8);
    seen.insert(choice.mesh.coordinates(7));
  }
  EXPECT_EQ(choices.size(), 20u);  // three factors 2 over four axes
  EXPECT_EQ(seen.size(), choices.size());
}

TEST(MeshChoices, RefuseWhatARunRefuses) {
  for (const MeshChoice& choice : choices_of(small_gpt(), 8)) {
    Config config = small_gpt();
    config.parallel.pp = choice.mesh.size(Axis::kPp);
    config.parallel.cp = choice.mesh.size(Axis::kCp);
    config.parallel.tp = choice.mesh.size(Axis::kTp);
    std::string refusal;
    try {
      check_config(config);
      const BatchPlan batch = plan_batch(config, MeshShape::fit(config.parallel, 8));
      if (config.parallel.pp > 1) plan_pipeline(config, batch);
    } catch (const ConfigError& error) {
      refusal = error.what();
    }
    EXPECT_EQ(choice.obstacle, refusal) << choice.mesh.to_string();
  }
  Config config = small_gpt();
  config.model.n_heads = config.model.n_kv_heads = 4;
  const std::vector<MeshChoice> choices = choices_of(config, 8);
  EXPECT_NE(choice_at(choices, 1, 1, 8).obstacle.find("cannot share 4 heads"), std::string::npos);
  EXPECT_TRUE(choice_at(choices, 2, 1, 4).works());
}

/// Memory is that of plan/memory.h, and bytes of all axes add up to those of the program.
TEST(MeshChoices, AgreeWithThePlansOfSingleRuns) {
  for (const MeshChoice& choice : choices_of(small_gpt(), 8)) {
    if (!choice.works()) continue;
    Config config = small_gpt();
    config.parallel.pp = choice.mesh.size(Axis::kPp);
    config.parallel.cp = choice.mesh.size(Axis::kCp);
    config.parallel.tp = choice.mesh.size(Axis::kTp);
    const std::string what = choice.mesh.to_string();
    EXPECT_EQ(choice.needed.peak(), rank_bytes(config, 8, Device::kCpu).peak()) << what;
    const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory,
                                      largest_split(config.parallel));
    const EngineSetting setting = engine_setting(config, choice.mesh, choice.batch.accumulation);
    int64_t most = 0;
    for (const StepProgram& program : config_programs(config, facts, choice.batch, setting)) {
      const int64_t sent = program.wire_bytes(choice.batch.accumulation);
      EXPECT_EQ(bytes_by_axis(program, choice.batch.accumulation).total(), sent) << what;
      most = std::max(most, sent);
    }
    EXPECT_EQ(choice.sent.total(), most) << what;
    EXPECT_EQ(choice.sent.tp > 0, choice.mesh.size(Axis::kTp) > 1) << what;
    EXPECT_EQ(choice.sent.cp > 0, choice.mesh.size(Axis::kCp) > 1) << what;
    EXPECT_EQ(choice.sent.stages > 0, choice.mesh.size(Axis::kPp) > 1) << what;
    EXPECT_EQ(choice.idle > 0.0, choice.mesh.size(Axis::kPp) > 1) << what;
  }
}

/// 1F1B with equal stages and m micro-batches leaves (pp - 1) / (m + pp - 1) of the time idle: more stages
/// more, whatever tensor parallelism does.
TEST(MeshChoices, MoreStagesIdleMoreAndSendLessAlongTp) {
  Config config = small_gpt();
  config.model.vocab_size = 256;
  config.pipeline.split.kind = StageCut::Kind::kEven;
  const std::vector<MeshChoice> choices = choices_of(config, 8);
  const MeshChoice &tp2 = choice_at(choices, 4, 1, 2), &tp4 = choice_at(choices, 2, 1, 4);
  ASSERT_EQ(tp2.batch.accumulation, 8);
  EXPECT_NEAR(tp2.idle, 3.0 / 11.0, 0.05);
  EXPECT_NEAR(tp4.idle, 1.0 / 9.0, 0.05);
  EXPECT_GT(tp2.idle, tp4.idle);
  EXPECT_LT(2 * tp2.sent.tp, tp4.sent.tp);
}

TEST(MeshChoices, ComeInTheOrderOfWhatFitsThenOfWhatIsLost) {
  std::vector<int64_t> peaks;
  for (const MeshChoice& choice : choices_of(small_gpt(), 8)) {
    if (choice.works()) peaks.push_back(choice.needed.peak());
  }
  std::ranges::sort(peaks);
  const int64_t memory = peaks[peaks.size() / 2];
  const auto place = [memory](const MeshChoice& choice) {
    return !choice.works() ? 2 : choice.fits(memory) ? 0 : 1;
  };
  const std::vector<MeshChoice> choices = choices_of(small_gpt(), 8, memory);
  std::set<int> places;
  for (size_t at = 0; at < choices.size(); ++at) {
    places.insert(place(choices[at]));
    if (at == 0) continue;
    EXPECT_LE(place(choices[at - 1]), place(choices[at]));
    if (place(choices[at - 1]) == place(choices[at])) {
      EXPECT_LE(choices[at - 1].lost(), choices[at].lost());
    }
  }
  EXPECT_TRUE(places.contains(0));
  EXPECT_TRUE(places.contains(1));
}

/// Slow links between hosts make what crosses them dearer.
TEST(MeshChoices, AxesBeyondAHostTakeSlowLinks) {
  RankSpeed speed = usual_speed(Device::kCpu);
  speed.host_ranks = 4;
  const auto sending = [&](double between) {
    speed.bytes_between = between;
    const auto choices = mesh_choices(small_gpt(), 8, Device::kCpu, speed);
    return std::pair(choice_at(choices, 1, 1, 4).sending_s, choice_at(choices, 1, 1, 8).sending_s);
  };
  const auto fast = sending(speed.bytes), slow = sending(speed.bytes / 10.0);
  EXPECT_NEAR(slow.second, 10.0 * fast.second, 1e-9 + 1e-6 * slow.second);
  EXPECT_GT(slow.first, fast.first);                 // data goes between hosts
  EXPECT_LT(slow.first, 10.0 * fast.first * 0.999);  // layers do not
}

/// Four ranks along tp do not divide hosts of six: ranks 4 to 7 are on two hosts.
TEST(MeshChoices, GroupsOnTwoHostsTakeSlowLinks) {
  RankSpeed speed = usual_speed(Device::kCpu);
  const auto slowdown = [&](int64_t host_ranks, int64_t pp, int64_t tp) {
    speed.host_ranks = host_ranks;
    const auto seconds = [&](double between) {
      speed.bytes_between = between;
      return choice_at(mesh_choices(small_gpt(), 12, Device::kCpu, speed), pp, 1, tp).sending_s;
    };
    return seconds(speed.bytes / 10.0) / seconds(speed.bytes);
  };
  EXPECT_NEAR(slowdown(6, 3, 4), 10.0, 1e-6);
  EXPECT_LT(slowdown(6, 6, 2), 9.9);
  EXPECT_LT(slowdown(4, 3, 4), 9.9);
  EXPECT_DOUBLE_EQ(slowdown(14, 3, 4), 1.0);  // one host has all of them
}

TEST(MeshChoices, CountWhatBackwardComputesAgain) {
  const auto computing = [](Recompute recompute, int64_t every = 1) {
    Config config = small_gpt();
    config.memory.recompute = recompute;
    config.memory.recompute_every = every;
    return choice_at(choices_of(config, 1), 1, 1, 1).computing_s;
  };
  const double once = computing(Recompute::kNone);
  EXPECT_DOUBLE_EQ(computing(Recompute::kCheap), once);
  // A block repeats all of its 12 d x d but the last 4, and attention with T d; the model also has a head, V
  // d.
  const double d = 64.0, length = 128.0, forward = 8.0 * (24.0 * d * d + 2.0 * length * d) + 2.0 * 256.0 * d,
               again = 8.0 * (16.0 * d * d + 2.0 * length * d);
  EXPECT_NEAR(computing(Recompute::kBlock) / once, 1.0 + again / (3.0 * forward), 1e-9);
  EXPECT_NEAR(computing(Recompute::kBlock, 2) / once, 1.0 + again / (6.0 * forward), 1e-9);
}

TEST(MeshChoices, ALlamaOf70BillionParametersIsPlannedOn64Gpus) {
  Config config;
  config.model = find_preset("llama-70b").model;
  config.data.seq_len = 4096;
  config.precision.compute = Dtype::kBf16;
  config.train.global_batch = 32;
  config.train.micro_batch = 1;
  const int64_t h100 = int64_t{81559} << 20;
  const auto choices = mesh_choices(config, 64, Device::kCuda, usual_speed(Device::kCuda), h100);
  EXPECT_EQ(choices.size(), 84u);
  EXPECT_TRUE(choices.front().works());
  EXPECT_TRUE(choices.front().fits(h100));
  EXPECT_TRUE(choice_at(choices, 1, 1, 64).works());  // 8 key and value heads, each on 8 ranks
  EXPECT_NE(choice_at(choices, 1, 1, 1).obstacle.find("global_batch 32 cannot be split"), std::string::npos);
}

/// Every rank is in one group of a kind, with ranks that differ along the axes of that kind alone.
TEST(MeshGroups, ShareOutTheRanks) {
  const MeshShape mesh({2, 2, 2, 2, 3});
  const std::vector<MeshGroups> kinds = mesh_groups(mesh);
  EXPECT_EQ(kinds.size(), 6u);
  for (const MeshGroups& kind : kinds) {
    std::vector<int64_t> all;
    for (const std::vector<int64_t>& group : kind.ranks) {
      EXPECT_TRUE(std::ranges::is_sorted(group));
      for (const int64_t rank : group) EXPECT_EQ(mesh.group(rank, kind.axes), group) << kind.name;
      all.insert(all.end(), group.begin(), group.end());
    }
    std::ranges::sort(all);
    std::vector<int64_t> wanted(static_cast<size_t>(mesh.world_size()));
    std::iota(wanted.begin(), wanted.end(), 0);
    EXPECT_EQ(all, wanted) << kind.name;
  }
  EXPECT_TRUE(mesh_groups(MeshShape()).empty());
  const auto one = mesh_groups(MeshShape({1, 1, 4, 1, 1}));
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one.front().name, "shard");
}

}  // namespace
}  // namespace trireme::plan
