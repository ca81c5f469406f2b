// Tensors and submodules that a module registers more than once: one parameter each, whatever the policy.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/parallel/plain_net.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/parallel/module_parameters.h"

namespace trireme {
namespace {

using comm::World;
using namespace test;

enum class Tie {
  kTwiceInABlock,  ///< blocks.1.again is blocks.1.w1
  kAcrossBlocks,   ///< blocks.2.w1 is blocks.0.w1
  kRootAndBlock,   ///< tied is blocks.3.w2, and used by the root as well
  kBlockTwice,     ///< blocks.4 is blocks.1
  kBlockElsewhere  ///< extra is blocks.2, registered before the container
};

struct TiedNet : Net {
  TiedNet(uint64_t seed, Tie tie) : Net(seed), tie_(tie) {
    auto list = std::make_shared<ModuleListImpl>();
    if (tie == Tie::kTwiceInABlock) blocks[1]->register_parameter("again", blocks[1]->w1);
    if (tie == Tie::kAcrossBlocks) blocks[2] = std::make_shared<Block>(seed + 20, kWidth, blocks[0]->w1);
    if (tie == Tie::kBlockTwice) blocks.push_back(blocks[1]);
    if (tie == Tie::kRootAndBlock) register_parameter("tied", blocks[3]->w2);
    if (tie == Tie::kBlockElsewhere) {
      unregister_module("blocks");
      register_module("extra", blocks[2]);
      register_module("blocks", list);
    } else {
      replace_module("blocks", list);
    }
    for (size_t i = 0; i < blocks.size(); ++i) list->register_module(std::to_string(i), blocks[i]);
  }
  at::Tensor forward(at::Tensor x) const override {
    for (const auto& block : blocks) x = block->forward(x);
    if (tie_ == Tie::kRootAndBlock) x = at::tanh(at::matmul(x, blocks[3]->w2));
    return at::matmul(x, head);
  }

 private:
  Tie tie_;
};

constexpr Tie kTies[] = {Tie::kTwiceInABlock, Tie::kAcrossBlocks, Tie::kRootAndBlock, Tie::kBlockTwice,
                         Tie::kBlockElsewhere};

TEST(SharedParameters, TrainAsOnOneRankUnderEveryPolicy) {
  at::set_num_threads(1);
  for (const Tie tie : kTies) {
    TiedNet plain(7, tie);
    const Weights wanted = reference(plain);
    for (const char* policy : {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp:shard_grad_op"}) {
      for (const double bucket_mib : {0.0005, 25.0}) {
        for (const int64_t ranks : {1, 2, 3}) {
          run_ranks(ranks, [&](std::shared_ptr<World> world) {
            const comm::Mesh mesh = mesh_of(world);
            TiedNet net(7 + static_cast<uint64_t>(world->rank()), tie);
            const auto engine = wrap(net, mesh, {.policy = policy, .bucket_mib = bucket_mib});
            expect_close(test::train(net, *engine, mesh), wanted,
                         fmt::format("tie {}, {} on {}, buckets of {} MiB", static_cast<int>(tie), policy,
                                     ranks, bucket_mib));
          });
        }
      }
    }
  }
}

TEST(SharedParameters, OtherNamesAreKept) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_of(world);
    TiedNet net(7, Tie::kBlockTwice);
    const auto engine = parallel::fully_shard(net, mesh);
    const std::map<std::string, std::string> wanted = {
        {"blocks.4.w1", "blocks.1.w1"}, {"blocks.4.b1", "blocks.1.b1"}, {"blocks.4.w2", "blocks.1.w2"}};
    EXPECT_EQ(engine->aliases(), wanted);
    EXPECT_EQ(weights_of(*engine).size(), 13u) << "four blocks of three and a head";
  });
}

TEST(SharedParameters, ATableUsedByTwoModulesMayHaveSparseGradients) {
  for (const bool shards : {false, true}) {
    run_ranks(2, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_of(world);
      torch::nn::Module net;
      const auto list = std::make_shared<ModuleListImpl>();
      const at::Tensor table = at::zeros({10, 4});
      for (const char* name : {"0", "1"}) {
        const auto part = std::make_shared<torch::nn::Module>();
        part->register_parameter("table", table);
        list->register_module(name, part);
      }
      net.register_module("parts", list);
      const parallel::WrapOptions sum = {.average = parallel::Average::kSum};
      const auto engine =
          shards ? parallel::fully_shard(net, mesh, sum) : parallel::data_parallel(net, mesh, sum);
      const at::Tensor mine = net.named_parameters().front().value();
      const at::Tensor first = at::embedding(mine, at::tensor({world->rank(), int64_t{7}}), -1, false, true);
      const at::Tensor second = at::embedding(mine, at::tensor({int64_t{7}, int64_t{9}}), -1, false, true);
      engine->backward(first.sum() + 2 * second.sum());
      const auto optimizer = optim::build(descent(1.0), engine->optimizer_params());
      engine->step(*optimizer);
      at::Tensor expected = at::zeros({10, 4});
      for (const int64_t row : {0, 1, 7, 7}) expected[row] -= 1.0;
      for (const int64_t row : {7, 7, 9, 9}) expected[row] -= 2.0;
      for (const auto& [name, weight] : weights_of(*engine)) EXPECT_TRUE(at::equal(weight, expected)) << name;
    });
  }
}

TEST(SharedParameters, OneMemoryUnderTwoTensorsIsRefusedByName) {
  const auto refused = [](const torch::nn::Module& module, const std::vector<std::string>& names) {
    try {
      parallel::check_separate_memory(module);
      ADD_FAILURE() << "nothing was refused";
    } catch (const LogicError& error) {
      for (const auto& name : names)
        EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << name;
    }
  };
  Net view(7);
  view.register_parameter("turned", view.blocks[0]->w1.detach().t());
  refused(view, {"turned", "blocks.0.w1"});
  Net buffer(7);
  buffer.register_buffer("average", buffer.head.detach());
  refused(buffer, {"average", "head"});
}

}  // namespace
}  // namespace trireme
