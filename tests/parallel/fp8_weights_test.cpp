// Matrices that ranks keep and gather in FP8 are those that a rank with all of them would cast, and whoever
// asks for what is nowhere is told so.
#include "trireme/parallel/fp8_weights.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <numeric>

#include "tests/support/engine_on_model.h"
#include "tests/support/spawn.h"
#include "tests/support/tiny_training.h"
#include "trireme/kernels/fp8.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/storage.h"
#include "trireme/state/state_file.h"

namespace trireme::parallel {
namespace {

using plan::BlockLayer;

plan::UnitSpec block() {
  return {.name = "block",
          .params = {{"norm", {40}},
                     {.name = "q", .shape = {32, 48}, .layer = BlockLayer::kQkv},
                     {.name = "k", .shape = {16, 48}, .layer = BlockLayer::kQkv},
                     {.name = "out", .shape = {48, 32}, .layer = BlockLayer::kAttentionOutput},
                     {"bias", {7}},
                     {.name = "up", .shape = {64, 48}, .layer = BlockLayer::kFeedForwardIn}},
          .fp8_block = 0};
}

std::vector<int64_t> all_ranks(const comm::World& world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

at::Tensor masters(int64_t numel, uint64_t seed) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn({numel}, generator, at::TensorOptions().dtype(at::kFloat)) *
         at::exp2(at::arange(numel).remainder(11).to(at::kFloat) - 5.0);
}

TEST(Fp8Weights, AreTheCastsOfWholeMatricesOnAnyNumberOfRanks) {
  at::set_num_threads(1);
  for (const int64_t ranks : {1, 2, 3, 5, 8}) {
    test::run_ranks(ranks, [&](std::shared_ptr<comm::World> world) {
      SCOPED_TRACE(ranks);
      const plan::UnitSpec spec = block();
      const plan::FlatLayout layout = plan::flat_layout(spec, ranks);
      const auto group = world->make_group("all", all_ranks(*world));
      const plan::Range range = layout.shard(world->rank());
      Fp8Weights weights(spec, layout, range, *group, {.compute = at::kBFloat16, .device = at::kCPU});
      std::vector<std::pair<std::string, at::Tensor>> params;
      for (const plan::FlatEntry& entry : layout.entries())
        params.emplace_back(entry.name, at::empty(entry.shape, at::TensorOptions().dtype(at::kBFloat16)));
      weights.lend(params);
      for (const uint64_t seed : {1u, 2u}) {
        const at::Tensor all = masters(layout.numel(), seed);
        weights.expire();
        weights.refresh(*group, all.narrow(0, range.begin, range.size()));
        weights.refresh(*group, {});  // it has nothing to do
        allocate_storage(weights.whole());
        at::Tensor whole = weights.whole();
        group->all_gather(whole, weights.shard());
        const auto values = [&](size_t first, size_t count) {
          std::vector<at::Tensor> parts;
          for (size_t i = first; i < first + count; ++i) {
            const plan::FlatEntry& entry = layout.entries()[i];
            parts.push_back(all.narrow(0, entry.offset, entry.numel).view(entry.shape).to(at::kBFloat16));
          }
          return at::cat(parts);
        };
        for (const auto& [first, count] : {std::pair<size_t, size_t>{1, 2}, {3, 1}, {5, 1}}) {
          const at::Tensor matrix = values(first, count);
          const kernels::Fp8Matrix wanted =
              kernels::fp8_cast(matrix, kernels::fp8_amax(matrix, kernels::Fp8Scaling::kTensor), {}).plain;
          const kernels::Fp8Matrix lent = nn::lent_fp8(params[first].second);
          EXPECT_TRUE(at::equal(lent.values.view(at::kByte), wanted.values.view(at::kByte))) << first;
          EXPECT_TRUE(at::equal(lent.scale, wanted.scale)) << first;
          EXPECT_TRUE(at::equal(kernels::fp8_transposed(lent).values.view(at::kByte),
                                wanted.values.view(at::kByte).t().contiguous()));
        }
        EXPECT_FALSE(nn::lent_fp8(params[2].second).defined()) << "lent with its neighbour";
        for (const size_t rest : {0u, 4u}) {
          EXPECT_TRUE(weights.is_whole(rest));
          EXPECT_TRUE(at::equal(weights.whole_parameter(rest), values(rest, 1))) << rest;
        }
      }
    });
  }
}

TEST(Fp8Weights, AreCastByMagnitudesOfEarlierStepsWhichSeeTheirOwn) {
  at::set_num_threads(1);
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    const plan::UnitSpec spec = block();
    const plan::FlatLayout layout = plan::flat_layout(spec, 2);
    const plan::Range range = layout.shard(world->rank());
    const at::Tensor amax = at::tensor({0.0f, 0.0f, 3.0f}), seen = at::zeros({3});
    const Fp8Scales scales = [&](int64_t number, BlockLayer layer) {
      EXPECT_EQ(number, 0);
      return layer == BlockLayer::kQkv ? nn::Fp8Layer{amax, seen} : nn::Fp8Layer();
    };
    const auto group = world->make_group("all", all_ranks(*world));
    Fp8Weights weights(spec, layout, range, *group,
                       {.compute = at::kBFloat16, .device = at::kCPU, .fp8_scales = scales});
    const at::Tensor all = masters(layout.numel(), 3);
    weights.refresh(*group, all.narrow(0, range.begin, range.size()));
    const plan::FlatEntry &first = layout.entries()[1], &last = layout.entries()[2];
    const at::Tensor matrix =
        all.narrow(0, first.offset, last.end() - first.offset).view({-1, 48}).to(at::kBFloat16);
    const at::Tensor wanted =
        kernels::fp8_cast(matrix, at::tensor({3.0f}), {}, kernels::Fp8Copy::kPlain, at::zeros({1}))
            .plain.values.view(at::kByte)
            .view({-1});
    const plan::Range mine = plan::intersect(range, {first.offset, last.end()});
    if (mine.size() == 0) return;
    EXPECT_TRUE(at::equal(weights.shard().narrow(0, mine.begin - range.begin, mine.size()),
                          wanted.narrow(0, mine.begin - first.offset, mine.size())));
    const at::Tensor of_part = matrix.view({-1}).narrow(0, mine.begin - first.offset, mine.size());
    EXPECT_EQ(seen[2].item<float>(), of_part.abs().max().item<float>());
  });
}

struct Pair {
  /// Ranks with the same model twice: matrices of blocks gathered in FP8, and in bf16.
  explicit Pair(const std::shared_ptr<comm::World>& world)
      : gathered(config(), facts(true), world, options(), /*seed=*/1),
        plain(config(), facts(false), world, options(), /*seed=*/1) {
    for (test::EngineOnModel* one : {&gathered, &plain})
      train::connect(*one->model, one->engine, {}, {.recipe = plan::Fp8::kTensorwise});
  }

  static plan::ModelConfig config() {
    plan::ModelConfig config = test::tiny_model(plan::ModelFamily::kLlama);
    config.d_model = 64;
    config.n_heads = config.n_kv_heads = 4;
    config.d_ff = 128;
    return config;
  }
  static plan::ModelFacts facts(bool gather) {
    return plan::describe(config(), 16, {.fp8 = {.recipe = plan::Fp8::kTensorwise, .gather = gather}});
  }
  static Options options() {
    return {.policy = plan::find_policy("fsdp"),
            .compute = at::kBFloat16,
            .reduce = at::kBFloat16,
            .device = at::kCPU};
  }

  static at::Tensor logits(test::EngineOnModel& one) {
    const at::NoGradGuard no_grad;
    return one.model->forward(at::arange(32).view({2, 16}).remainder(config().vocab_size));
  }
  bool agree() { return at::equal(logits(gathered), logits(plain)); }
  template <typename Change>
  void both(const Change& change) {
    change(gathered);
    change(plain);
  }

  test::EngineOnModel gathered, plain;
};

void on_two_ranks(const std::function<void(Pair& pair)>& body) {
  at::set_num_threads(1);
  test::run_ranks(2, [&](std::shared_ptr<comm::World> world) {
    Pair pair(world);
    body(pair);
  });
}

at::Tensor parameter(test::EngineOnModel& one, const std::string& end) {
  for (const auto& entry : one.model->named_parameters()) {
    if (entry.key().ends_with(end)) return entry.value();
  }
  throw LogicError("no parameter ends with {}", end);
}

TEST(Fp8Weights, MatricesAreReadWhereTheyAreHeldAndInEvaluation) {
  on_two_ranks([](Pair& pair) {
    const at::Tensor matrix = parameter(pair.gathered, "q_proj.weight");
    EXPECT_TRUE(pair.agree());
    EXPECT_THROW(matrix.detach().sum(), c10::Error) << "it is in FP8, if at all";
    {
      const DataParallel::Held held(pair.gathered.engine), other(pair.plain.engine);
      EXPECT_TRUE(at::equal(matrix, parameter(pair.plain, "q_proj.weight")));
      EXPECT_TRUE(pair.agree());
    }
    EXPECT_THROW(matrix.detach().sum(), c10::Error);
    const at::Tensor in_fp8 = Pair::logits(pair.gathered);
    pair.both([](test::EngineOnModel& one) { one.model->eval(); });
    EXPECT_TRUE(pair.agree());
    EXPECT_FALSE(at::equal(Pair::logits(pair.gathered), in_fp8)) << "evaluation is in bf16";
    pair.both([](test::EngineOnModel& one) { one.model->train(); });
    EXPECT_TRUE(at::equal(Pair::logits(pair.gathered), in_fp8));
    EXPECT_TRUE(pair.agree());
  });
}

TEST(Fp8Weights, WhatIsWrittenAndLoadedIsMultiplied) {
  const std::string path = testing::TempDir() + "fp8_weights_" + std::to_string(::getpid()) + ".safetensors";
  on_two_ranks([&](Pair& pair) {
    const at::Tensor at_first = Pair::logits(pair.gathered);
    state::save_weights(pair.gathered.engine, path);
    pair.both([](test::EngineOnModel& one) {
      const at::NoGradGuard no_grad;
      const DataParallel::Held held(one.engine);
      parameter(one, "post_attention_layernorm.weight").mul_(1.5);
      parameter(one, "down_proj.weight").mul_(1.25);
    });
    EXPECT_TRUE(pair.agree());
    EXPECT_FALSE(at::equal(Pair::logits(pair.gathered), at_first));

    for (const Whole form : {Whole::kReadable, Whole::kAsUsed}) {
      const DataParallel::Held held(pair.gathered.engine, form), other(pair.plain.engine);
      pair.both([&](test::EngineOnModel& one) { state::load_weights(one.engine, path); });
      EXPECT_TRUE(pair.agree());
      EXPECT_TRUE(at::equal(Pair::logits(pair.gathered), at_first));
    }
  });
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace trireme::parallel
