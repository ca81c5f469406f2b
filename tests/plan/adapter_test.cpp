// Adapters in the record of a model, in step programs and in the rules for configs.
#include "trireme/plan/adapter.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/support/refusal.h"
#include "trireme/base/env.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/peft.h"
#include "trireme/plan/presets.h"
#include "trireme/plan/recompute.h"
#include "trireme/plan/stages.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {
namespace {

Config load_adapted(std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"model.preset=llama-1b", "adapter.kind=lora"});
  return plan::load({.path = "", .text = "", .overrides = std::move(overrides)}, Environment()).config;
}

ModelFacts facts_of_adapted(const Config& config) {
  return describe(config.model, config.data.seq_len, config.precision, config.memory);
}

TEST(LowRankAdapter, AddsTwoThinMatricesToEachLayerAndFreezesTheRest) {
  const Config config = load_adapted({"adapter.rank=8"});
  const ModelFacts facts = facts_of_adapted(config);
  const ModelConfig& model = config.model;
  const int64_t d = model.d_model, f = model.d_ff, kv = model.n_kv_heads * head_dim(model);
  // Input and output features of q, of k and v, of o, and of gate, up and down.
  const int64_t layers = 2 * d + 2 * (d + kv) + 2 * d + 3 * (d + f);
  EXPECT_EQ(trained_params(facts), 8 * layers * model.n_layers);
  for (const UnitSpec& unit : facts.units) {
    for (const ParamSpec& param : unit.params)
      EXPECT_NE(param.frozen, is_of_adapter(param.name)) << param.name;
  }
}

TEST(LowRankAdapter, TargetsAreNamesOfLayers) {
  const ModelFacts facts = facts_of_adapted(load_adapted({"adapter.targets=q_proj,v_proj"}));
  int64_t adapted = 0;
  for (const UnitSpec& unit : facts.units) adapted += std::ssize(unit.trained());
  EXPECT_EQ(adapted, 2 * 2 * load_adapted({}).model.n_layers);
  test::expect_refusal([] { load_adapted({"adapter.targets=q_proj,c_attn"}); },
                       {"'c_attn'", "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"});
}

/// Neighbours stay neighbours: q, k and v are multiplied as one matrix.
TEST(LowRankAdapter, FrozenWeightsLieAsTheyDoWithoutAdapters) {
  Config config = load_adapted({});
  const UnitSpec adapted = facts_of_adapted(config).units[1];
  config.model.adapter = {};
  const UnitSpec plain = facts_of_adapted(config).units[1];
  const FlatLayout frozen = frozen_layout(adapted, 4), all = flat_layout(plain, 4);
  ASSERT_EQ(frozen.entries().size(), all.entries().size());
  for (size_t i = 0; i < all.entries().size(); ++i) {
    EXPECT_EQ(frozen.entries()[i].name, all.entries()[i].name);
    EXPECT_EQ(frozen.entries()[i].offset, all.entries()[i].offset);
  }
}

/// 4 FLOPs a frozen weight and token: no gradient of it is computed.
TEST(LowRankAdapter, FrozenWeightsSaveAThirdOfTheProducts) {
  Config config = load_adapted({});
  const ModelFacts adapted = facts_of_adapted(config);
  config.model.adapter = {};
  const ModelFacts plain = facts_of_adapted(config);
  const double attention = plain.flops_per_token - 6.0 * static_cast<double>(plain.matmul_params);
  EXPECT_DOUBLE_EQ(adapted.flops_per_token, 4.0 * static_cast<double>(plain.matmul_params) +
                                                6.0 * static_cast<double>(trained_params(adapted)) +
                                                attention);
}

/// Attention computes what it does without adapters, and a frozen weight has no pass of its own: an adapted
/// block of no adapters costs two thirds of its products.
TEST(LowRankAdapter, StagesAreCutByWhatAnAdaptedModelCosts) {
  Config config = load_adapted({"adapter.targets=q_proj"});
  const auto parts_of = [](const Config& one) {
    return stage_parts(one.model, facts_of_adapted(one), /*spread_head=*/false, CutAt::kHalves);
  };
  const std::vector<StagePart> adapted = parts_of(config);
  config.model.adapter = {};
  const std::vector<StagePart> plain = parts_of(config);
  ASSERT_EQ(adapted.size(), plain.size());
  EXPECT_NEAR(adapted[0].attention, plain[0].attention, 1e-6 * plain[0].attention);
  EXPECT_GT(plain[0].attention, 0.0);
  const PassWork mlp = work_of(adapted[1]), head = work_of(adapted.back());
  EXPECT_EQ(mlp.backward_weight, 0.0);
  EXPECT_EQ(mlp.forward, work_of(plain[1]).forward);
  EXPECT_EQ(head.all(), 2.0 / 3.0 * work_of(plain.back()).all());
  const double thin = 2.0 * static_cast<double>(16 * 2 * config.model.d_model);  // A and B of q_proj
  EXPECT_NEAR(work_of(adapted[0]).backward_weight, thin, 1e-6 * thin);
}

class AdapterPrograms : public ::testing::TestWithParam<std::string> {};

TEST_P(AdapterPrograms, AreCheckedAndReadBackAndHoldNothingOfTheBaseButItsWeights) {
  const Config config = load_adapted({"precision.compute=bf16", "train.global_batch=8", "train.micro_batch=1",
                                      "parallel.policy=" + GetParam()});
  const MeshShape mesh = MeshShape::fit(config.parallel, 4);
  const BatchPlan batch = plan_batch(config, mesh);
  const ModelFacts facts = facts_of_adapted(config);
  const EngineSetting setting = engine_setting(config, mesh, batch.accumulation, Device::kCuda);
  const StepProgram program = config_program(config, facts, batch, setting);
  EXPECT_NO_THROW(verify(program));
  EXPECT_EQ(step_program_from_text(to_text(program)), program);
  const int64_t trained = trained_params(facts), base = 2 * (facts.params - trained);
  const HeldBytes kept = kept_bytes(program);
  const int64_t padding = 1 << 16;
  const int64_t weights = kept[Role::kParameters] + kept[Role::kShard];
  const int64_t share = setting.shards_parameters() ? base / 4 : base;
  EXPECT_GE(weights, share);
  EXPECT_LE(weights, share + 2 * trained + padding);
  EXPECT_LE(kept[Role::kMaster] + kept[Role::kMoments], 12 * trained + padding);
  EXPECT_LE(kept[Role::kGradients] + kept[Role::kReduced], 6 * trained + padding);
}

INSTANTIATE_TEST_SUITE_P(Policies, AdapterPrograms,
                         ::testing::Values("ddp", "zero1", "zero2", "zero3", "fsdp"));

/// Configs of PEFT are read back; a key that changes the base or the sum in another way is refused by its
/// key.
TEST(LowRankAdapter, ReadsConfigsOfPeft) {
  const ModelConfig model = load_adapted({"adapter.rank=8", "adapter.alpha=12"}).model;
  const nlohmann::json written = nlohmann::json::parse(to_peft(model).dump());
  EXPECT_NO_THROW(check_peft(written, model, "file"));
  struct Change {
    const char* key;
    nlohmann::json value;
    const char* words;
  };
  for (const Change& change :
       {Change{"r", 4, "adapter.rank=8"}, Change{"lora_alpha", 16, "adapter.alpha=12"},
        Change{"use_dora", true, "set adapter.kind to dora"}, Change{"use_rslora", true, "use_rslora"},
        Change{"bias", "all", "bias"}, Change{"modules_to_save", {"lm_head"}, "modules_to_save"},
        Change{"rank_pattern", {{"q_proj", 4}}, "rank_pattern"},
        Change{"init_lora_weights", "pissa", "pissa"}, Change{"peft_type", 3, "peft_type"},
        Change{"peft_type", "IA3", "peft_type"}}) {
    nlohmann::json changed = written;
    changed[change.key] = change.value;
    test::expect_refusal([&] { check_peft(changed, model, "file"); }, {"file", change.words});
  }
  for (const nlohmann::json& begun : {nlohmann::json(true), nlohmann::json("gaussian"), nlohmann::json()}) {
    nlohmann::json changed = written;
    changed["init_lora_weights"] = begun;
    EXPECT_NO_THROW(check_peft(changed, model, "file"));
  }
}

/// A config that PEFT has written becomes keys of ours, which are those that wrote it.
TEST(LowRankAdapter, TakesItsKeysFromConfigsOfPeft) {
  const ModelConfig model = load_adapted({"adapter.kind=dora", "adapter.rank=8", "adapter.alpha=12",
                                          "adapter.targets=k_proj,up_proj"})
                                .model;
  nlohmann::json written = nlohmann::json::parse(to_peft(model).dump());
  const ModelConfig again = load_adapted(keys_of_peft(written, "file")).model;
  EXPECT_EQ(to_peft(again), to_peft(model));
  written["target_modules"] = {"model.layers.1.mlp.up_proj", "model.layers.0.mlp.up_proj", "k_proj"};
  EXPECT_EQ(load_adapted(keys_of_peft(written, "file")).model.adapter.targets, "k_proj,up_proj");
  written["target_modules"] = "all-linear";
  EXPECT_EQ(load_adapted(keys_of_peft(written, "file")).model.adapter.targets, "all");
  for (const nlohmann::json& targets :
       {nlohmann::json(".*_proj"), nlohmann::json::array(), nlohmann::json({3}), nlohmann::json({"all"}),
        nlohmann::json({"q_proj,k_proj"}), nlohmann::json()}) {
    written["target_modules"] = targets;
    test::expect_refusal([&] { keys_of_peft(written, "file"); }, {"file", "target_modules", "list"});
  }
  written.erase("r");
  test::expect_refusal([&] { keys_of_peft(written, "file"); }, {"file", "r=nothing", "a number"});
  test::expect_refusal([&] { keys_of_peft(nlohmann::json(3), "file"); }, {"file", "no JSON object"});
}

/// A number for each output of a layer, beside A and B.
TEST(LowRankAdapter, LengthsOfDoraAreTrainedAndPeftIsTold) {
  const Config config = load_adapted({"adapter.kind=dora", "adapter.targets=k_proj,down_proj"});
  const ModelConfig& model = config.model;
  std::map<std::string, int64_t> lengths;
  for (const ParamSpec& param : facts_of_adapted(config).units[1].trained())
    if (is_magnitude(param.name)) lengths[param.name] = param.numel();
  const std::map<std::string, int64_t> wanted = {
      {"model.layers.0.self_attn.k_proj.lora_magnitude_vector", model.n_kv_heads * head_dim(model)},
      {"model.layers.0.mlp.down_proj.lora_magnitude_vector", model.d_model}};
  EXPECT_EQ(lengths, wanted);
  const nlohmann::json written = nlohmann::json::parse(to_peft(model).dump());
  EXPECT_EQ(written["use_dora"], true);
  EXPECT_NO_THROW(check_peft(written, model, "file"));
  test::expect_refusal([&] { check_peft(written, load_adapted({"adapter.kind=lora"}).model, "file"); },
                       {"use_dora=true", "set adapter.kind to dora"});
  nlohmann::json without = written;
  without.erase("use_dora");
  test::expect_refusal([&] { check_peft(without, model, "file"); }, {"use_dora=false", "to lora"});
}

/// A fraction of what A reads, which PEFT calls lora_dropout.
TEST(LowRankAdapter, DropoutIsAShareBelowOneThatPeftIsTold) {
  EXPECT_EQ(to_peft(load_adapted({}).model)["lora_dropout"], 0.0);
  const ModelConfig model = load_adapted({"adapter.dropout=0.25"}).model;
  EXPECT_EQ(to_peft(model)["lora_dropout"], 0.25);
  EXPECT_TRUE(draws_in_training(model));
  EXPECT_FALSE(draws_in_training(load_adapted({}).model));
  test::expect_refusal([] { load_adapted({"adapter.dropout=1"}); }, {"adapter.dropout=1", "below 1"});
  test::expect_refusal(
      [] {
        load_adapted({"adapter.kind=none", "adapter.dropout=0.1"});
      },
      {"adapter.dropout=0.1", "remove it"});
}

/// Each A keeps what it reads, and the mask of it.
TEST(LowRankAdapter, DropoutKeepsInputsAndMasks) {
  const ModelConfig model = load_adapted({"adapter.dropout=0.1", "adapter.targets=q_proj,down_proj"}).model;
  const PrecisionConfig precision{.compute = Dtype::kBf16};
  ModelConfig undropped = model;
  undropped.adapter.dropout = 0.0;
  const auto added = [&](BlockPart part) {
    return block_bytes(model, /*seq_len=*/128, precision, {}, 0, part).saved -
           block_bytes(undropped, /*seq_len=*/128, precision, {}, 0, part).saved;
  };
  // Three bytes an element, in place of the two of what is read without dropout.
  EXPECT_EQ(added(BlockPart::kAttention), model.d_model);
  EXPECT_EQ(added(BlockPart::kRest), model.d_ff);
  EXPECT_EQ(added(BlockPart::kWhole), model.d_model + model.d_ff);
}

/// Inputs of layers without adapters are not kept; one input of several is kept once, in FP8 as well, and
/// not where it is cheap to compute again. Attention keeps what its last product reads in any case.
TEST(LowRankAdapter, KeepsWhatItsMatricesReadAlone) {
  const auto kept = [](const char* targets, const char* recompute = "none", const char* fp8 = "off") {
    const Config config =
        load_adapted({std::string("adapter.targets=") + targets, "precision.compute=bf16",
                      std::string("memory.recompute=") + recompute, std::string("precision.fp8=") + fp8});
    return block_bytes(config.model, config.data.seq_len, config.precision, config.memory, 1).saved;
  };
  const ModelConfig model = load_adapted({}).model;
  const int64_t none = kept("o_proj");
  EXPECT_EQ(kept("q_proj") - none, 2 * model.d_model);
  EXPECT_EQ(kept("q_proj,k_proj,v_proj") - none, 2 * model.d_model);
  EXPECT_EQ(kept("up_proj") - none, 2 * model.d_model);
  EXPECT_EQ(kept("down_proj") - none, 2 * model.d_ff);
  EXPECT_EQ(kept("all") - none, 2 * (2 * model.d_model + model.d_ff));
  EXPECT_EQ(kept("all", "cheap"), none);
  EXPECT_EQ(kept("all", "none", "tensorwise") - kept("o_proj", "none", "tensorwise"),
            2 * (2 * model.d_model + model.d_ff));
}

TEST(LowRankAdapter, ComputesCheapOutputsAgainOnGpusUnlessItDropsSome) {
  const auto settled = [](std::vector<std::string> more) {
    more.insert(more.end(), {"model.preset=llama-8b", "precision.compute=bf16", "data.seq_len=4096"});
    return settle_recompute(load_adapted(more), Device::kCuda).memory.recompute;
  };
  EXPECT_EQ(settled({}), Recompute::kCheap);
  EXPECT_EQ(settled({"adapter.dropout=0.1"}), Recompute::kNone);
}

/// The gradient of a length reads the output of its row.
TEST(LowRankAdapter, LengthsKeepOutputs) {
  const ModelConfig model = load_adapted({"adapter.kind=dora", "adapter.targets=up_proj"}).model;
  ModelConfig plain = model;
  plain.adapter.kind = AdapterKind::kLora;
  const PrecisionConfig precision{.compute = Dtype::kBf16};
  EXPECT_EQ(block_bytes(model, /*seq_len=*/128, precision, {}, 0).saved -
                block_bytes(plain, /*seq_len=*/128, precision, {}, 0).saved,
            2 * model.d_ff);
  const auto reads = [](const char* targets) {
    const Config config = load_adapted({"adapter.kind=dora", targets});
    return reads_last_product(facts_of_adapted(config).units[1]);
  };
  EXPECT_FALSE(reads("adapter.targets=up_proj"));
  EXPECT_TRUE(reads("adapter.targets=down_proj"));
}

TEST(LowRankAdapter, RefusesWhatItCannotBeCombinedWith) {
  test::expect_refusal(
      [] {
        load_adapted({"memory.recompute=cheap", "adapter.dropout=0.1"});
      },
      {"memory.recompute=cheap", "adapter.dropout=0.1", "use block or none"});
  test::expect_refusal(
      [] {
        load_adapted({"adapter.kind=none", "adapter.rank=4"});
      },
      {"adapter.rank=4", "remove it"});
  test::expect_refusal(
      [] {
        plan::load({.path = "", .text = "", .overrides = {"model.preset=resnet50", "adapter.kind=lora"}},
                   Environment());
      },
      {"adapter.kind=lora", "resnet"});
}

}  // namespace
}  // namespace trireme::plan
