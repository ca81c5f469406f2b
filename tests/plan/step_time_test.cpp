// Predicted times of steps: laws that hold whatever the rates are, and numbers that can be had in another
// way.
#include "trireme/plan/step_time.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/simulate.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {
namespace {

Config timed_config(std::vector<std::string> overrides) {
  std::vector<std::string> all = {"model.preset=gpt-tiny", "train.global_batch=16", "train.micro_batch=2"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return load({.overrides = std::move(all)}, Environment()).config;
}

StepTime timed(const std::vector<std::string>& overrides, int64_t ranks, const Rates& rates) {
  return step_time(timed_config(overrides), ranks, rates.on_gpu ? Device::kCuda : Device::kCpu, rates);
}

double sum_of_causes(const RankSeconds& rank) {
  return std::accumulate(rank.causes.begin(), rank.causes.end(), 0.0);
}

Rates with_links(Rates rates, double factor) {
  for (std::vector<LinkRate>* const links : {&rates.links.gather, &rates.links.reduce}) {
    for (LinkRate& link : *links) link.bytes_per_s *= factor;
  }
  rates.links.send.bytes_per_s *= factor;
  rates.links.between.bytes_per_s *= factor;
  return rates;
}

const std::vector<std::vector<std::string>> kWays = {{"parallel.policy=ddp"},
                                                     {"parallel.policy=zero1"},
                                                     {"parallel.policy=zero2"},
                                                     {"parallel.policy=fsdp"},
                                                     {"parallel.policy=fsdp", "memory.recompute=block"},
                                                     {"parallel.policy=ddp", "parallel.bucket_mib=1"},
                                                     {"parallel.tp=2"},
                                                     {"parallel.cp=2"},
                                                     {"parallel.pp=2"},
                                                     {"parallel.pp=2", "pipeline.schedule=zb_v"},
                                                     {"parallel.pp=2", "parallel.policy=fsdp"}};

TEST(StepTime, IsTheSumOfItsCausesOnEveryRank) {
  for (const Rates& rates : {usual_rates(Device::kCpu), usual_rates(Device::kCuda, "h200")}) {
    for (const std::vector<std::string>& way : kWays) {
      const StepTime time = timed(way, 4, rates);
      EXPECT_GT(time.seconds, 0.0);
      for (const RankSeconds& rank : time.ranks) {
        EXPECT_NEAR(sum_of_causes(rank), time.seconds, 1e-9 * time.seconds) << way.front();
        for (const double cause : rank.causes) EXPECT_GE(cause, 0.0) << way.front();
        EXPECT_LE(rank.exposed(), rank.communicating + 1e-12) << way.front();
      }
    }
  }
}

/// Sums in another order.
constexpr double kRounding = 1e-12;

TEST(StepTime, IsNeverShorterOnSlowerLinks) {
  for (const Rates& rates : {usual_rates(Device::kCpu), usual_rates(Device::kCuda, "h100")}) {
    for (const std::vector<std::string>& way : kWays) {
      const double usual = timed(way, 4, rates).seconds;
      const double slow = timed(way, 4, with_links(rates, 0.5)).seconds;
      const double slowest = timed(way, 4, with_links(rates, 1e-4)).seconds;
      EXPECT_GE(slow, usual * (1.0 - kRounding)) << way.front();
      EXPECT_GT(slowest, 1.01 * usual) << way.front();
    }
  }
}

TEST(StepTime, GrowsWithWork) {
  const Rates rates = usual_rates(Device::kCpu);
  const double base = timed({}, 1, rates).seconds;
  for (const char* const more :
       {"model.n_layers=5", "model.d_model=256", "data.seq_len=256", "train.global_batch=32",
        "model.vocab_size=1000", "model.d_ff=1024", "memory.recompute=block"})
    EXPECT_GT(timed({more}, 1, rates).seconds, 1.001 * base) << more;
}

TEST(StepTime, OfOneRankHasNoCommunication) {
  const StepTime time = timed({"parallel.policy=fsdp"}, 1, usual_rates(Device::kCpu));
  ASSERT_EQ(time.ranks.size(), 1u);
  EXPECT_EQ(time.ranks[0].communicating, 0.0);
  EXPECT_EQ(time.ranks[0].exposed(), 0.0);
  EXPECT_EQ(time.idle(), 0.0);
}

TEST(StepTime, CountsMicroBatchesThatTheProgramDoesNotShow) {
  const Rates rates = usual_rates(Device::kCpu);
  std::vector<double> seconds;
  for (const int64_t batch : {6, 8, 10, 40})
    seconds.push_back(timed({fmt::format("train.global_batch={}", batch)}, 1, rates).seconds);
  const double each = seconds[1] - seconds[0];
  EXPECT_GT(each, 0.0);
  EXPECT_NEAR(seconds[2] - seconds[1], each, 1e-9 * seconds[0]);
  EXPECT_NEAR(seconds[3] - seconds[2], 15.0 * each, 1e-9 * seconds[3]);
}

TEST(StepTime, IsShorterWhereCommunicationRunsBesideComputation) {
  const Rates rates = usual_rates(Device::kCuda, "h200");
  const std::vector<std::string> large = {"model.preset=llama-1b", "data.seq_len=4096",
                                          "train.global_batch=8",  "train.micro_batch=2",
                                          "parallel.policy=fsdp",  "precision.compute=bf16"};
  const StepTime beside = timed(large, 4, rates);
  std::vector<std::string> apart = large;
  apart.emplace_back("parallel.overlap=false");
  const StepTime serial = timed(apart, 4, rates);
  const RankSeconds &one = beside.ranks[0], &other = serial.ranks[0];
  EXPECT_LT(beside.seconds, serial.seconds);
  EXPECT_NEAR(other.exposed(), other.communicating, 1e-9);
  EXPECT_LT(one.exposed(), 0.5 * one.communicating);
  EXPECT_GT(beside.mfu, 0.2);
  EXPECT_LT(beside.mfu, 0.75);
}

TEST(StepTime, OfMoreTransfersInFp32IsNotShorter) {
  const Rates rates = with_links(usual_rates(Device::kCpu), 0.1);
  EXPECT_GT(timed({"precision.compute=fp32"}, 2, rates).ranks[0].communicating,
            timed({"precision.compute=bf16"}, 2, rates).ranks[0].communicating);
}

/// Two units whose forward pass takes 1 s and whose backward takes 2 s, sharded over two ranks.
struct TwoUnits {
  StepProgram program;
  ActionCosts costs;
  TimingSetting setting;
};
TwoUnits two_units(bool beside) {
  Config config;
  config.parallel.policy = PolicyName::kFsdp;
  const MeshShape mesh = MeshShape::fit(config.parallel, 2);
  EngineSetting setting = engine_setting(config, mesh, 1);
  setting.beside = beside;
  const std::vector<ProgramUnit> units = {{.name = "root", .numel = 16}, {.name = "block", .numel = 16}};
  const Work one{TimeCause::kProducts, 1.0};
  return {.program = step_program(units, setting, declared_order(units, UseFrom::kRunUnit)),
          .costs = {.work = {{{one}, {one}, {one}}, {{one}, {one}, {one}}},
                    .update = {0.25, 0.25},
                    .sum = {100.0, 100.0}},
          .setting = {.transfer_s = [](const Transfer& transfer) { return transfer.bytes > 0 ? 0.5 : 0.0; },
                      .beside = beside}};
}
RankSeconds seconds_of(const TwoUnits& run) {
  return time_of_programs({run.program}, {run.costs}, run.setting).ranks.front();
}

TEST(StepTime, OfTransfersOneAfterTheOtherIsTheirSum) {
  const TwoUnits run = two_units(false);
  const RankSeconds rank = seconds_of(run);
  const int64_t gathers = std::ranges::count(run.program.actions, ActionKind::kUnshard, &Action::kind);
  EXPECT_EQ(gathers, 2);
  EXPECT_DOUBLE_EQ(rank[TimeCause::kProducts], 6.0);
  EXPECT_DOUBLE_EQ(rank[TimeCause::kUpdate], 0.5);
  EXPECT_DOUBLE_EQ(rank[TimeCause::kGather], 1.0);
  EXPECT_DOUBLE_EQ(rank[TimeCause::kReduce], 1.0);
  EXPECT_DOUBLE_EQ(rank.communicating, 2.0);
  EXPECT_DOUBLE_EQ(rank.units[1].computing, 3.25);
  EXPECT_DOUBLE_EQ(rank.units[1].gathering, 0.5);
  EXPECT_DOUBLE_EQ(rank.units[1].reducing, 0.5);
  EXPECT_DOUBLE_EQ(rank.units[1].waiting, 1.0);
}

TEST(StepTime, OfTransfersBesideComputationHasWhatNothingHides) {
  TwoUnits run = two_units(true);
  // The root's parameters come first, those of the block while the root computes; the root's gradient is
  // summed when nothing is left to compute.
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kGather], 0.5);
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kReduce], 0.5);
  EXPECT_DOUBLE_EQ(seconds_of(run).communicating, 2.0);
  run.setting.transfer_s = [](const Transfer& transfer) { return transfer.bytes > 0 ? 3.0 : 0.0; };
  // Both gathers follow each other on their lane, of which the root's second hides one; so do both sums,
  // beside the root's two seconds of backward.
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kGather], 5.0);
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kReduce], 4.0);
}

TEST(StepTime, WaitsForTheNormOfTheGradient) {
  TwoUnits run = two_units(false);
  const double without = seconds_of(run)[TimeCause::kReduce];
  run.setting.norm_s = 7.0;
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kReduce], without);
  run.setting.needs_norm = true;
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kReduce], without + 7.0);
}

TEST(StepTime, HasTheLaunchesThatADeviceWaitsFor) {
  TwoUnits run = two_units(false);
  run.setting.launch_s = 0.125;  // of eight operations
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kHost], 1.0);
  run.setting.runs_ahead = true;
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kHost], 0.0);
  run.setting.launch_s = 2.0;
  EXPECT_DOUBLE_EQ(seconds_of(run)[TimeCause::kHost], 16.0 - 8.5);
}

TEST(StepTime, AddsUpGradientsOfMicroBatchesOfAnotherDtype) {
  const Rates rates = usual_rates(Device::kCpu);
  EXPECT_GT(timed({"precision.compute=bf16"}, 1, rates).ranks[0][TimeCause::kSums], 0.0);
  EXPECT_EQ(timed({"precision.compute=bf16", "train.micro_batch=16"}, 1, rates).ranks[0][TimeCause::kSums],
            0.0);
}

TEST(StepTime, TakesGathersAndSumsFromLinksOfTheirOwn) {
  const std::vector<std::string> way = {"parallel.policy=fsdp"};
  const Rates rates = usual_rates(Device::kCpu);
  const RankSeconds usual = timed(way, 2, rates).ranks[0];
  Rates slow = rates;
  for (LinkRate& link : slow.links.gather) link.bytes_per_s *= 0.1;
  const RankSeconds gathers = timed(way, 2, slow).ranks[0];
  EXPECT_GT(gathers[TimeCause::kGather], 2.0 * usual[TimeCause::kGather]);
  EXPECT_NEAR(gathers[TimeCause::kReduce], usual[TimeCause::kReduce], 1e-12);
  slow = rates;
  for (LinkRate& link : slow.links.reduce) link.bytes_per_s *= 0.1;
  const RankSeconds sums = timed(way, 2, slow).ranks[0];
  EXPECT_NEAR(sums[TimeCause::kGather], usual[TimeCause::kGather], 1e-12);
  EXPECT_GT(sums[TimeCause::kReduce], 2.0 * usual[TimeCause::kReduce]);
}

TEST(StepTime, IsLongerAcrossHosts) {
  Rates rates = usual_rates(Device::kCuda, "h200");
  const std::vector<std::string> way = {"parallel.policy=fsdp", "train.global_batch=32"};
  const double within = timed(way, 8, rates).ranks[0].communicating;
  rates.links.host_ranks = 4;
  EXPECT_GT(timed(way, 8, rates).ranks[0].communicating, within);
  // Ranks along tp are neighbours.
  const std::vector<std::string> cut = {"parallel.tp=2", "train.global_batch=32"};
  const double tp = timed(cut, 8, rates).ranks[0][TimeCause::kParts];
  rates.links.between.bytes_per_s *= 0.1;
  EXPECT_EQ(timed(cut, 8, rates).ranks[0][TimeCause::kParts], tp);
}

TEST(UnitWork, OfAnUpdateReadsAndWritesItsState) {
  EXPECT_DOUBLE_EQ(update_bytes(8.0, 64, 4), 8.0 * 12.0 + 2.0 * 64.0);
  EXPECT_DOUBLE_EQ(update_bytes(8.0, 16, 2), 8.0 * 12.0 + 2.0 * 16.0 + 8.0 * 2.0);
}

/// A pass of a stage takes one second, and half a backward pass too; nothing else takes time.
std::vector<ActionCosts> equal_costs(const std::vector<StepProgram>& programs) {
  const Work one{TimeCause::kProducts, 1.0};
  std::vector<ActionCosts> all;
  for (const StepProgram& program : programs) {
    ActionCosts& costs = all.emplace_back();
    for (const ProgramUnit& unit : program.units) {
      const bool begins_stage = unit.name.starts_with(kRootUnit);
      costs.work.push_back(begins_stage ? UnitWork{{one}, {one}, {one}} : UnitWork{});
    }
  }
  return all;
}

TEST(StepTime, OfAPipelineIsTheSimulatorsForEqualCosts) {
  for (const ScheduleName schedule : all_values<ScheduleName>()) {
    const Config config = timed_config({"parallel.pp=4", "pipeline.micro_batches=8", "model.n_layers=16",
                                        fmt::format("pipeline.schedule={}", schedule)});
    const MeshShape mesh = MeshShape::fit(config.parallel, 4);
    const BatchPlan batch = plan_batch(config, mesh);
    const PipelinePlan plan = plan_pipeline(config, batch);
    const std::vector<StepProgram> programs =
        config_programs(config, describe(config.model, config.data.seq_len), batch,
                        engine_setting(config, mesh, batch.accumulation), plan);
    const StepTime time = time_of_programs(programs, equal_costs(programs),
                                           {.transfer_s = [](const Transfer&) { return 0.0; }});
    const Simulation simulated = simulate(plan.schedule);
    EXPECT_NEAR(time.seconds, simulated.makespan, 1e-9) << name(schedule);
    EXPECT_NEAR(time.idle(), 1.0 - simulated.efficiency(), 1e-9) << name(schedule);
  }
}

TEST(StepTime, OfMessagesThatNeverComeIsRefused) {
  const Config config = timed_config({"parallel.pp=2", "pipeline.micro_batches=8"});
  const MeshShape mesh = MeshShape::fit(config.parallel, 2);
  const BatchPlan batch = plan_batch(config, mesh);
  std::vector<StepProgram> programs =
      config_programs(config, describe(config.model, config.data.seq_len), batch,
                      engine_setting(config, mesh, batch.accumulation), plan_pipeline(config, batch));
  std::erase_if(programs[0].actions, [](const Action& action) { return action.kind == ActionKind::kSend; });
  EXPECT_THROW(
      time_of_programs(programs, equal_costs(programs), {.transfer_s = [](const Transfer&) { return 0.0; }}),
      ConfigError);
}

/// A rank computes for a second, sends for half a second, and then waits until its buffer is free.
TEST(StepTime, HasTheWaitForAMessageToBeOnItsWay) {
  StepProgram program;
  program.units = {{.name = "root", .numel = 16}};
  program.actions = {{.kind = ActionKind::kForward, .unit = 0, .micro_batch = 0},
                     {.kind = ActionKind::kSend, .micro_batch = 0, .transfers = {{.bytes = 8}}, .peer = 1},
                     {.kind = ActionKind::kWait, .awaits = 1}};
  const Work one{TimeCause::kProducts, 1.0};
  const ActionCosts costs{.work = {{{one}, {}, {}}}};
  const StepTime time = time_of_programs({program}, {costs},
                                         {.transfer_s = [](const Transfer&) { return 0.5; }, .beside = true});
  EXPECT_DOUBLE_EQ(time.seconds, 1.5);
  EXPECT_DOUBLE_EQ(time.ranks[0][TimeCause::kStages], 0.5);
}

TEST(StepTime, OfImagesIsRefused) {
  const Config config = load({.overrides = {"model.preset=resnet18-cifar"}}, Environment()).config;
  EXPECT_THROW(step_time(config, 1, Device::kCpu, usual_rates(Device::kCpu)), ConfigError);
}

/// The products of a model, without attention, are the FLOPs that its facts count, at one rate for all.
TEST(UnitWork, HasTheFlopsOfTheModelsFacts) {
  constexpr double kFlops = 1e9;
  Rates rates = usual_rates(Device::kCpu);
  ProductGrid grid{.m = {1, 1 << 20}, .n = {1, 1 << 20}, .k = {1, 1 << 20}, .seconds = {}};
  for (const int64_t m : grid.m) {
    for (const int64_t n : grid.n) {
      for (const int64_t k : grid.k)
        grid.seconds.push_back(2.0 * static_cast<double>(m) * static_cast<double>(n) *
                               static_cast<double>(k) / kFlops);
    }
  }
  rates.products["fp32"] = {grid, grid, grid};
  rates.attention["fp32"] = {{128, 32, kFlops, kFlops}};
  for (const char* const preset : {"gpt-tiny", "llama-tiny"}) {
    const std::string model = fmt::format("model.preset={}", preset);
    const Config config = timed_config({model});
    const StepTime time = step_time(config, 1, Device::kCpu, rates);
    const double flops =
        describe(config.model, config.data.seq_len).flops_per_token * static_cast<double>(time.tokens);
    const RankSeconds& rank = time.ranks[0];
    EXPECT_NEAR(rank[TimeCause::kProducts] + rank[TimeCause::kAttention], flops / kFlops,
                1e-6 * flops / kFlops)
        << preset;
    const Config half = timed_config({model, "parallel.tp=2"});
    const RankSeconds cut = step_time(half, 2, Device::kCpu, rates).ranks[0];
    EXPECT_NEAR(cut[TimeCause::kProducts] + cut[TimeCause::kAttention], 0.5 * flops / kFlops,
                1e-6 * flops / kFlops)
        << preset;
  }
}

/// Counted for profiles, whatever the rates: the FLOPs of the facts, on one rank or shared by tp and stages.
TEST(StepWork, HasTheFlopsOfTheModelsFacts) {
  for (const char* const preset : {"gpt-tiny", "llama-tiny"}) {
    const std::string model = fmt::format("model.preset={}", preset);
    const Config config = timed_config({model});
    const auto tokens = static_cast<double>(config.train.global_batch * config.data.seq_len);
    const double flops = describe(config.model, config.data.seq_len).flops_per_token * tokens;
    const auto counted = [&](const Config& one, int64_t ranks) {
      const StepWork work = step_work(one, ranks, Device::kCpu);
      return work[KernelKind::kGemm].flops + work[KernelKind::kAttention].flops;
    };
    EXPECT_NEAR(counted(config, 1), flops, 1e-6 * flops) << preset;
    EXPECT_NEAR(counted(timed_config({model, "parallel.policy=fsdp"}), 2), 0.5 * flops, 1e-6 * flops);
    EXPECT_NEAR(counted(timed_config({model, "parallel.tp=2"}), 2), 0.5 * flops, 1e-6 * flops);
    const double first_stage = counted(timed_config({model, "parallel.pp=2"}), 2);
    EXPECT_GT(first_stage, 0.2 * flops) << "the last one has the head as well";
    EXPECT_LT(first_stage, 0.5 * flops);
  }
}

/// Bytes by hand, of a token and layer: a norm is two passes, the second one four with its sum, backward
/// four; of attention and rotations 2 (q + kv) forward.
TEST(StepWork, HasTheBytesOfItsOperands) {
  const Config config = timed_config({"model.preset=llama-tiny", "memory.recompute=none"});
  const ModelConfig model = complete(config.model, config.data.seq_len);
  const auto layers = static_cast<double>(model.n_layers), d = static_cast<double>(model.d_model),
             f = static_cast<double>(model.d_ff), words = static_cast<double>(model.vocab_size),
             keys = static_cast<double>(model.n_kv_heads * head_dim(model));
  const auto tokens = static_cast<double>(config.train.global_batch * config.data.seq_len);
  const StepWork work = step_work(config, 1, Device::kCpu);
  const auto expect = [&](KernelKind kind, double features) {
    EXPECT_NEAR(work[kind].bytes / (4.0 * tokens), features, 1e-6 * features) << name(kind);
  };
  expect(KernelKind::kNorm, layers * (6.0 + 8.0) * d + (2.0 + 4.0) * d);
  expect(KernelKind::kActivation, layers * (3.0 + 5.0) * f);
  expect(KernelKind::kAttention, layers * (2.0 + 4.0) * (d + keys));
  expect(KernelKind::kRope, layers * (2.0 + 2.0) * (d + keys));
  expect(KernelKind::kLoss, 4.0 * words);
  EXPECT_EQ(work[KernelKind::kNorm].flops, 0.0);
  const auto params = static_cast<double>(describe(config.model, config.data.seq_len).params);
  const double norm = config.train.grad_clip > 0.0 ? 4.0 : 0.0;
  EXPECT_NEAR(work[KernelKind::kOptimizer].bytes, (7.0 * 4.0 + norm) * params, 0.01 * norm * params);
  EXPECT_EQ(work.dtype, "fp32");
  EXPECT_FALSE(work.fp8);
}

TEST(StepWork, InFp8CastsMayComputeActivations) {
  const auto work = [](const char* recipe) {
    return step_work(timed_config({"model.preset=llama-tiny", "precision.compute=bf16",
                                   fmt::format("precision.fp8={}", recipe)}),
                     1, Device::kCuda);
  };
  const StepWork plain = work("off"), fp8 = work("tensorwise");
  EXPECT_TRUE(fp8.fp8 && !plain.fp8);
  EXPECT_GT(plain[KernelKind::kActivation].bytes, 0.0);
  EXPECT_EQ(fp8[KernelKind::kActivation].bytes, 0.0) << "it is not counted";
  EXPECT_EQ(fp8[KernelKind::kGemm].flops, plain[KernelKind::kGemm].flops);
  EXPECT_LT(fp8[KernelKind::kGemm].bytes, plain[KernelKind::kGemm].bytes);
}

/// Backward computes a block without its last product again, which is work of the same kinds.
TEST(StepWork, CountsWhatIsComputedAgain) {
  const auto work = [](const char* recompute) {
    return step_work(timed_config({"model.preset=llama-tiny", fmt::format("memory.recompute={}", recompute)}),
                     1, Device::kCpu);
  };
  const StepWork none = work("none"), block = work("block");
  const Config config = timed_config({"model.preset=llama-tiny"});
  const ModelConfig model = complete(config.model, config.data.seq_len);
  const auto d = static_cast<double>(model.d_model), f = static_cast<double>(model.d_ff),
             keys = static_cast<double>(model.n_kv_heads * head_dim(model));
  const auto tokens = static_cast<double>(config.train.global_batch * config.data.seq_len);
  const double again =
      2.0 * tokens * static_cast<double>(model.n_layers) * d * (d + 2.0 * keys + d + 2.0 * f);
  EXPECT_NEAR(block[KernelKind::kGemm].flops - none[KernelKind::kGemm].flops, again, 1e-6 * again);
  EXPECT_NEAR(3.0 * block[KernelKind::kAttention].flops, 4.0 * none[KernelKind::kAttention].flops,
              1e-3 * none[KernelKind::kAttention].flops);
}

/// Seconds of the causes of a step where one rate of memory is a byte a second and all others take no time.
double bytes_moved(const Config& config, Device device, double MemoryRates::*rate,
                   const std::vector<TimeCause>& causes) {
  constexpr double kNoTime = std::numeric_limits<double>::infinity();
  Rates rates = usual_rates(device);
  for (auto& [dtype, memory] : rates.memory) {
    memory = {kNoTime, kNoTime, kNoTime, kNoTime, kNoTime, kNoTime, kNoTime, kNoTime};
    memory.*rate = 1.0;
  }
  const RankSeconds rank = step_time(config, 1, device, rates).ranks[0];
  double sum = 0.0;
  for (const TimeCause cause : causes) sum += rank[cause];
  return sum;
}

/// Features that a token's operations read and write, counted by hand from the layers of a block.
TEST(UnitWork, MovesTheBytesOfItsOperations) {
  for (const bool llama : {false, true}) {
    const Config config = timed_config({fmt::format("model.preset={}", llama ? "llama-tiny" : "gpt-tiny")});
    const ModelConfig model = complete(config.model, config.data.seq_len);
    const auto layers = static_cast<double>(model.n_layers), d = static_cast<double>(model.d_model),
               f = static_cast<double>(model.d_ff), words = static_cast<double>(model.vocab_size),
               keys = static_cast<double>(model.n_kv_heads * head_dim(model)), tables = llama ? 1.0 : 2.0;
    const auto tokens = static_cast<double>(config.train.global_batch * config.data.seq_len);
    const auto expect = [&](double MemoryRates::*rate, TimeCause cause, double features, const char* what) {
      EXPECT_NEAR(bytes_moved(config, Device::kCpu, rate, {cause}) / (4.0 * tokens), features,
                  1e-6 * features)
          << what << ", " << model.n_layers << " layers, llama " << llama;
    };
    const auto memory = TimeCause::kMemory;
    expect(&MemoryRates::norm, memory, layers * 6.0 * d + 2.0 * d, "norms");
    expect(&MemoryRates::norm_backward, memory, (2.0 * layers + 1.0) * 4.0 * d, "gradients of norms");
    expect(&MemoryRates::activation, memory, layers * (llama ? 3.0 : 2.0) * f, "activations");
    expect(&MemoryRates::activation_backward, memory, layers * (llama ? 5.0 : 3.0) * f, "their gradients");
    const double rotations = 2.0 * 2.0 * (d + keys), biases = 3.0 * d + d + f + d;
    expect(&MemoryRates::add, memory, layers * (llama ? rotations : biases) + 3.0 * tables * d, "sums");
    expect(&MemoryRates::add, TimeCause::kLoss, 2.0 * words, "the gradient of logits");
    expect(&MemoryRates::loss, TimeCause::kLoss, 2.0 * words, "logits");
  }
}

/// The lengths of rows read each weight twice for each micro-batch; outputs are read and written, and their
/// gradients read both and are written. What LoRA does is done, too.
TEST(UnitWork, HasThePassesOfDora) {
  const auto config = [](const char* kind) {
    return timed_config({"model.preset=llama-tiny", fmt::format("adapter.kind={}", kind)});
  };
  const Config dora = config("dora");
  const ModelConfig model = complete(dora.model, dora.data.seq_len);
  const auto layers = static_cast<double>(model.n_layers), d = static_cast<double>(model.d_model),
             f = static_cast<double>(model.d_ff),
             keys = static_cast<double>(model.n_kv_heads * head_dim(model));
  const auto moved = [&](const char* kind, double MemoryRates::*rate) {
    return bytes_moved(config(kind), Device::kCpu, rate, {TimeCause::kMemory}) / 4.0;
  };
  const auto tokens = static_cast<double>(dora.train.global_batch * dora.data.seq_len),
             micro_batches = static_cast<double>(dora.train.global_batch / dora.train.micro_batch);
  const double outputs = layers * (d + 2.0 * keys + d + 2.0 * f + d),
               weights = layers * (d * (d + 2.0 * keys) + d * d + 3.0 * d * f);
  EXPECT_NEAR(moved("dora", &MemoryRates::add) - moved("lora", &MemoryRates::add), 5.0 * outputs * tokens,
              1e-6 * outputs * tokens);
  EXPECT_NEAR(moved("dora", &MemoryRates::copy) - moved("lora", &MemoryRates::copy),
              2.0 * weights * micro_batches, 1e-6 * weights * micro_batches);
}

/// Products are those of the weights, whose gradients are not made, and of the adapters: all A on one input
/// are one product, and all B behind them another. A block that is computed again leaves its last one out.
TEST(UnitWork, HasTheProductsOfAdapters) {
  constexpr double kRank = 8.0;
  Rates rates = usual_rates(Device::kCpu);
  const ProductGrid counts{.m = {1, 2}, .n = {1, 2}, .k = {1, 2}, .seconds = std::vector<double>(8, 0.0)};
  const auto in_products = [&](ProductGrid grid, const char* recompute, TimeCause cause) {
    rates.products["fp32"] = {grid, grid, grid};
    const Config config = timed_config({"model.preset=llama-tiny", "adapter.kind=lora", "adapter.rank=8",
                                        fmt::format("memory.recompute={}", recompute)});
    return step_time(config, 1, Device::kCpu, rates).ranks[0][cause];
  };
  const Config config = timed_config({"model.preset=llama-tiny"});
  const ModelConfig model = complete(config.model, config.data.seq_len);
  const auto layers = static_cast<double>(model.n_layers), d = static_cast<double>(model.d_model),
             f = static_cast<double>(model.d_ff), words = static_cast<double>(model.vocab_size),
             kv = static_cast<double>(model.n_kv_heads * head_dim(model));
  ProductGrid flops = counts;
  for (size_t i = 0; i < flops.seconds.size(); ++i)
    flops.seconds[i] = 2.0 * static_cast<double>((i >> 2 & 1) + 1) * static_cast<double>((i >> 1 & 1) + 1) *
                       static_cast<double>((i & 1) + 1);
  const auto tokens = static_cast<double>(config.train.global_batch * config.data.seq_len);
  const double last = f * d, base = d * (d + 2.0 * kv) + d * d + 2.0 * d * f + last,
               read = kRank * (3.0 * d + d + 2.0 * d + f),
               written = 3.0 * kRank * (d + 2.0 * kv) + kRank * d + 2.0 * kRank * 2.0 * f + kRank * d;
  const double forward = layers * (base + read + written), head = 2.0 * words * d,
               backward = layers * (base + 2.0 * (read + written));
  const double wanted = 2.0 * tokens * (forward + backward + head);
  EXPECT_NEAR(in_products(flops, "none", TimeCause::kProducts), wanted, 1e-6 * wanted);
  const double plain_again = in_products(counts, "block", TimeCause::kAgain),
               again = 2.0 * tokens * (forward - layers * last);
  EXPECT_NEAR(in_products(flops, "block", TimeCause::kAgain) - plain_again, again, 1e-6 * again);
}

/// Each operand is read and written as one byte twice: the input before the product, and the gradient of the
/// output before those of backward. Queries, keys and values are one product, and so are a gate and what it
/// opens for.
TEST(UnitWork, InFp8CastsTheOperandsOfItsProducts) {
  const std::vector<std::string> plain = {"model.preset=llama-tiny", "precision.compute=bf16"};
  std::vector<std::string> in_fp8 = plain;
  in_fp8.push_back("precision.fp8=tensorwise");
  const Config config = timed_config(in_fp8);
  const ModelConfig model = complete(config.model, config.data.seq_len);
  const auto d = static_cast<double>(model.d_model), f = static_cast<double>(model.d_ff),
             keys = static_cast<double>(model.n_kv_heads * head_dim(model));
  const auto added = [&](const Config& one) {
    return bytes_moved(one, Device::kCuda, &MemoryRates::add, {TimeCause::kMemory});
  };
  const double inputs = d + d + d + f, outputs = d + 2.0 * keys + d + 2.0 * f + d;
  const auto tokens = static_cast<double>(config.train.global_batch * config.data.seq_len);
  const double wanted = static_cast<double>(model.n_layers) * (inputs + outputs) * (2.0 + 2.0) * tokens;
  EXPECT_NEAR(added(config) - added(timed_config(plain)), wanted, 1e-6 * wanted);
}

}  // namespace
}  // namespace trireme::plan
