// The units that fully_shard() chooses: what holds of any module, and what comes out for well-known ones.
#include "trireme/parallel/unit_choice.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"

namespace trireme {
namespace {

using namespace test;
using parallel::choose_blocks;
using parallel::ModuleSize;
using Blocks = std::vector<std::string>;

/// Draws from a seed.
class Dice {
 public:
  explicit Dice(uint64_t seed) : seed_(seed) {}
  int64_t below(int64_t bound) {
    return static_cast<int64_t>(mix64(seed_, draws_++) % static_cast<uint64_t>(bound));
  }

 private:
  uint64_t seed_, draws_ = 0;
};

struct SequentialImpl : torch::nn::Module {};  // a container by its name

/// Parameters of very different sizes, up to four floors, containers, and parameters with several names.
std::shared_ptr<torch::nn::Module> random_module(Dice& dice, std::vector<at::Tensor>& known, int64_t floors) {
  std::shared_ptr<torch::nn::Module> module;
  const int64_t kind = dice.below(4);
  if (kind == 0) module = std::make_shared<ModuleListImpl>();
  if (kind == 1) module = std::make_shared<SequentialImpl>();
  if (kind >= 2) module = std::make_shared<torch::nn::Module>();
  for (int64_t i = dice.below(3); i > 0; --i) {
    const bool shared = !known.empty() && dice.below(5) == 0;
    const auto pick = static_cast<size_t>(shared ? dice.below(static_cast<int64_t>(known.size())) : 0);
    known.push_back(shared ? known[pick] : at::empty({int64_t{1} << dice.below(18)}));
    module->register_parameter("p" + std::to_string(i), known.back());
  }
  for (int64_t i = floors > 0 ? dice.below(7) : 0; i > 0; --i)
    module->register_module("m" + std::to_string(i), random_module(dice, known, floors - 1));
  return module;
}

const ModuleSize& at_path(const ModuleSize& root, const std::string& path) {
  const size_t dot = path.find('.');
  const std::string name = path.substr(0, dot);
  const auto found = std::ranges::find(root.children, name, &ModuleSize::name);
  return dot == std::string::npos ? *found : at_path(*found, path.substr(dot + 1));
}

TEST(UnitChoice, EveryParameterIsInOneUnitAndNoUnitWithinAnother) {
  int64_t with_units = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Dice dice(seed), again(seed);
    std::vector<at::Tensor> known, known_again;
    const auto module = random_module(dice, known, 4);
    const auto twin = random_module(again, known_again, 4);
    for (const int64_t least : {int64_t{0}, int64_t{1}, int64_t{50'000}}) {
      const ModuleSize sizes = parallel::sizes_of(*module);
      const Blocks blocks = choose_blocks(sizes, least);
      with_units += !blocks.empty();
      EXPECT_EQ(blocks, choose_blocks(parallel::sizes_of(*twin), least)) << "the values do not matter";
      for (const std::string& block : blocks) {
        EXPECT_GE(at_path(sizes, block).total(), std::max<int64_t>(1, least)) << block;
        for (const std::string& other : blocks)
          EXPECT_TRUE(&block == &other || !(block + ".").starts_with(other + ".")) << block << " " << other;
      }
      std::map<std::string, int64_t> times;
      for (const plan::UnitSpec& unit : parallel::block_units(*module, {}, least)) {
        EXPECT_TRUE(unit.name == "root" || std::ranges::count(blocks, unit.name) == 1) << unit.name;
        for (const plan::ParamSpec& param : unit.params) ++times[param.name];
      }
      const Weights wanted = parameters_of(*module);
      EXPECT_EQ(times.size(), wanted.size()) << seed;
      for (const auto& [name, count] : times) EXPECT_TRUE(count == 1 && wanted.contains(name)) << name;
    }
  }
  EXPECT_GT(with_units, 300);
}

/// Elements that a parent registers itself lie in no submodule.
int64_t direct_above(const ModuleSize& module, const std::string& path, const Blocks& blocks) {
  if (std::ranges::find(blocks, path) != blocks.end()) return 0;
  int64_t sum = module.direct;
  for (const ModuleSize& child : module.children)
    sum += direct_above(child, path.empty() ? child.name : path + "." + child.name, blocks);
  return sum;
}

TEST(UnitChoice, NoUnitHoldsMoreThanAQuarterThatCouldBeDividedAndLittleStaysInTheRoot) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Dice dice(seed);
    std::vector<at::Tensor> known;
    const ModuleSize sizes = parallel::sizes_of(*random_module(dice, known, 4));
    const Blocks blocks = choose_blocks(sizes);
    int64_t in_blocks = 0;
    for (const std::string& block : blocks) {
      const ModuleSize& module = at_path(sizes, block);
      in_blocks += module.total();
      if (module.total() <= sizes.total() / 4) continue;
      const bool divisible = std::ranges::any_of(module.children, [&](const ModuleSize& child) {
        return child.total() > std::max<int64_t>(sizes.total() / 10, 4096);
      });
      EXPECT_TRUE(!divisible || module.direct > module.total() - module.direct) << seed << " " << block;
    }
    // What nobody could make a unit of: direct parameters, and submodules of some thousand elements.
    const int64_t rest = sizes.total() - in_blocks, direct = direct_above(sizes, "", blocks);
    EXPECT_LE(rest, direct + std::max<int64_t>(sizes.total() / 10, 200 * 4096)) << seed;
  }
}

ModuleSize leaf(std::string name, int64_t numel) {
  return {std::move(name), numel, {}, false};
}
ModuleSize parent(std::string name, std::vector<ModuleSize> children, bool container = false) {
  return {std::move(name), 0, std::move(children), container};
}
ModuleSize container(std::string name, std::vector<ModuleSize> children) {
  return parent(std::move(name), std::move(children), true);
}
ModuleSize repeat(std::string name, int64_t count, const ModuleSize& child, bool is_container = true) {
  std::vector<ModuleSize> children(static_cast<size_t>(count), child);
  for (size_t i = 0; i < children.size(); ++i) children[i].name = std::to_string(i);
  return parent(std::move(name), std::move(children), is_container);
}
/// A convolution with its batch norm, relu between them: what vision models are made of.
ModuleSize conv(std::string name, int64_t in, int64_t out, int64_t width = 3) {
  return container(std::move(name), {leaf("0", in * out * width * width), leaf("1", 2 * out)});
}

bool has(const Blocks& blocks, const std::string& path) {
  return std::ranges::find(blocks, path) != blocks.end();
}

TEST(UnitChoice, ATransformerInAListIsItsBlocksAndALargeEmbedding) {
  const auto model = [](int64_t layers, int64_t block, int64_t embedding) {
    const ModuleSize one = parent("", {leaf("attn", block / 3), leaf("mlp", block - block / 3)});
    return parent("", {parent("model", {leaf("embed_tokens", embedding), repeat("layers", layers, one),
                                        leaf("norm", 8192)}),
                       leaf("lm_head", embedding)});
  };
  const Blocks eight_b = choose_blocks(model(32, 218'000'000, 525'000'000));
  EXPECT_EQ(eight_b.size(), 34u);
  EXPECT_TRUE(has(eight_b, "model.embed_tokens") && has(eight_b, "model.layers.31") &&
              has(eight_b, "lm_head"));
  // 126 blocks of 0.8% each; the embeddings are smaller than a block and stay in the root.
  const Blocks largest = choose_blocks(model(126, 3'200'000'000, 2'100'000'000));
  EXPECT_EQ(largest.size(), 126u);
  // Two blocks of nearly a half each are divided.
  EXPECT_EQ(
      choose_blocks(model(2, 1'000'000, 10'000)),
      (Blocks{"model.layers.0.attn", "model.layers.0.mlp", "model.layers.1.attn", "model.layers.1.mlp"}));
}

TEST(UnitChoice, BlocksThatNoContainerHoldsAreFoundBySize) {
  std::vector<ModuleSize> children = {leaf("embedding", 600'000)};
  for (int64_t i = 0; i < 12; ++i)
    children.push_back(parent("block" + std::to_string(i), {leaf("attn", 30'000), leaf("mlp", 60'000)}));
  children.push_back(leaf("norm", 100));
  const Blocks blocks = choose_blocks(parent("", children));
  EXPECT_EQ(blocks.size(), 13u);
  EXPECT_TRUE(has(blocks, "embedding") && has(blocks, "block0") && has(blocks, "block11"));
  // Each has less than a hundredth, all together nearly everything.
  EXPECT_EQ(choose_blocks(repeat("", 300, leaf("", 20'000), /*is_container=*/false)).size(), 300u);
}

TEST(UnitChoice, AResNetIsItsBlocks) {
  const auto bottleneck = [](int64_t in, int64_t width) {
    std::vector<ModuleSize> parts = {leaf("conv1", in * width), leaf("conv2", width * width * 9),
                                     leaf("conv3", width * width * 4), leaf("norms", 12 * width)};
    if (in != 4 * width) parts.push_back(conv("downsample", in, 4 * width, 1));
    return parent("", parts);
  };
  const auto stage = [&](std::string name, int64_t count, int64_t in, int64_t width) {
    ModuleSize made = repeat(std::move(name), count, bottleneck(4 * width, width));
    made.children[0] = bottleneck(in, width);
    made.children[0].name = "0";
    return made;
  };
  const Blocks blocks = choose_blocks(parent(
      "", {leaf("conv1", 9408), leaf("bn1", 128), stage("layer1", 3, 64, 64), stage("layer2", 4, 256, 128),
           stage("layer3", 6, 512, 256), stage("layer4", 3, 1024, 512), leaf("fc", 2'049'000)}));
  EXPECT_EQ(blocks.size(), 4u + 6u + 3u + 1u) << "layer1 has 0.9% and stays in the root";
  EXPECT_TRUE(has(blocks, "layer2.0") && has(blocks, "layer3.5") && has(blocks, "layer4.2") &&
              has(blocks, "fc"));
}

TEST(UnitChoice, AUNetHasNoUnitsOfBatchNorms) {
  const auto stage = [](std::string name, int64_t in, int64_t out) {
    return parent(std::move(name),
                  {container("double_conv", {leaf("0", in * out * 9), leaf("1", 2 * out),
                                             leaf("3", out * out * 9), leaf("4", 2 * out)})});
  };
  const ModuleSize net =
      parent("", {stage("inc", 3, 64), stage("down1", 64, 128), stage("down2", 128, 256),
                  stage("down3", 256, 512), stage("down4", 512, 1024), stage("up1", 1536, 512),
                  stage("up2", 768, 256), stage("up3", 384, 128), stage("up4", 192, 64), leaf("outc", 130)});
  const Blocks blocks = choose_blocks(net);
  EXPECT_GE(blocks.size(), 5u);
  EXPECT_LE(blocks.size(), 18u);
  for (const std::string& block : blocks) {
    EXPECT_GE(at_path(net, block).total(), net.total() / 200) << block;
    EXPECT_LE(at_path(net, block).total(), net.total() * 2 / 5) << block;
  }
}

TEST(UnitChoice, AModuleOfItsOwnParametersStaysOneUnit) {
  // 0.7 of it are its own, as in torch's MultiheadAttention: entering would leave those in the root.
  ModuleSize attention = parent("attention", {leaf("out_proj", 30'000)});
  attention.direct = 70'000;
  EXPECT_EQ(choose_blocks(parent("", {attention, leaf("head", 10'000)})), (Blocks{"attention", "head"}));
}

TEST(UnitChoice, TheLeastSizeIsTheUsers) {
  const ModuleSize net = parent("", {repeat("blocks", 4, leaf("", 210)), leaf("head", 30'000)});
  EXPECT_TRUE(has(choose_blocks(net), "head"));
  EXPECT_EQ(choose_blocks(net, 1'000), (Blocks{"head"}));
  EXPECT_TRUE(choose_blocks(net, 40'000).empty());
}

TEST(UnitChoice, FullyShardUsesItAndSaysSo) {
  run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const comm::Mesh mesh = mesh_of(world);
    torch::nn::Module net;  // no container
    std::vector<std::shared_ptr<Block>> blocks;
    for (uint64_t i = 0; i < 5; ++i) {
      blocks.push_back(std::make_shared<Block>(i, 64));
      net.register_module("stage" + std::to_string(i), blocks.back());
    }
    const auto engine = parallel::fully_shard(net, mesh, {.overlap = false});
    ASSERT_EQ(engine->units().size(), 5u);
    int64_t most = 0;
    const auto gathered = [&] {
      int64_t bytes = 0;
      for (const auto& unit : engine->units())
        bytes += static_cast<int64_t>(unit->params().front().second.storage().nbytes());
      most = std::max(most, bytes);
    };
    at::Tensor x = random(1, {3, 64});
    for (const auto& block : blocks) {
      x = block->forward(x);
      gathered();
    }
    EXPECT_LE(most, engine->most_gathered_bytes());
    EXPECT_GE(2 * most, engine->most_gathered_bytes());
    EXPECT_LT(engine->most_gathered_bytes(), engine->whole_bytes());
    EXPECT_EQ(engine->whole_bytes(), 41'280 * static_cast<int64_t>(sizeof(float)));
    const std::string text = engine->describe();
    for (const char* word : {"fsdp:full_shard on 2 ranks", "41,280 parameters (fp32) in 5 units",
                             "stage1 to stage4", "8,256", "32.2 KiB", "16.1 KiB", "fp32"}) {
      EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
    }
  });
}

TEST(UnitChoice, OneUnitIsWarnedOfOnce) {
  testing::internal::CaptureStderr();
  run_ranks(2, [](std::shared_ptr<comm::World> world) {
    const comm::Mesh mesh = mesh_of(world);
    Block flat(1, 64);
    const auto engine = parallel::fully_shard(flat, mesh);
    EXPECT_EQ(engine->units().size(), 1u);
  });
  const std::string said = testing::internal::GetCapturedStderr();
  const size_t warning = said.find("WrapOptions::blocks");
  EXPECT_NE(warning, std::string::npos) << said;
  EXPECT_EQ(said.find("WrapOptions::blocks", warning + 1), std::string::npos) << said;
}

}  // namespace
}  // namespace trireme
