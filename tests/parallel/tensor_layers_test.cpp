// Layers that are cut over ranks, each against torch's, and what they refuse.
#include "trireme/parallel/tensor_layers.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/parallel/own_transformer.h"
#include "tests/support/refusal.h"
#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/plan/placement.h"

namespace trireme::test {
namespace {

using comm::World;
using parallel::ColumnLinear;
using parallel::RowLinear;
using parallel::Rows;

comm::Mesh tensor_mesh(const std::shared_ptr<World>& world) {
  return comm::make_mesh(world, plan::MeshShape({1, 1, 1, 1, world->size()}));
}

TEST(TensorLayers, CrossEntropyOfPartsIsThatOfTheWhole) {
  for (const int64_t words : {4, 37, 50}) {
    const at::Tensor logits = random(1, {3, 5, words}, 6.0);
    at::Tensor targets = at::arange(15).remainder(words).view({3, 5});
    targets[1][2] = -100;
    const at::Tensor whole = logits.clone().requires_grad_();
    const at::Tensor wanted = at::cross_entropy_loss(whole.flatten(0, 1), targets.flatten());
    (wanted * 3.0).backward();
    for (const int64_t ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](std::shared_ptr<World> world) {
        const comm::Mesh mesh = tensor_mesh(world);
        const plan::Range mine = plan::shard_range(words, ranks, world->rank());
        const at::Tensor part = logits.narrow(-1, mine.begin, mine.size()).clone().requires_grad_();
        const at::Tensor loss = parallel::vocab_parallel_cross_entropy(part, targets, words, mesh.tp);
        EXPECT_LT(relative_error(loss, wanted), 1e-6);
        // The loss counts once, whoever counts it.
        (loss * (world->rank() == 0 ? 3.0 : 0.0)).backward();
        EXPECT_LT(relative_error(part.grad(), whole.grad().narrow(-1, mine.begin, mine.size())), 1e-5)
            << words << " words on " << ranks << " ranks";
      });
    }
  }
}

TEST(TensorLayers, RanksExchangeThreeNumbersARowAndNoLogits) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const at::Tensor logits = random(1, {64, 500}), targets = at::arange(64);
    const parallel::VocabParallelCrossEntropy cross_entropy(1000, mesh.tp);
    const auto sent = [&] {
      int64_t bytes = 0;
      for (const auto& [kind, traffic] : mesh.tp->traffic()) bytes += traffic.bytes;
      return bytes;
    };
    cross_entropy.forward(logits, targets);
    const int64_t before = sent();
    cross_entropy.forward(logits, targets);
    EXPECT_EQ(sent() - before, 64 * 3 * 4);
  });
}

TEST(TensorLayers, WordsThatNoRankHasAreRefused) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    parallel::VocabParallelEmbedding words(11, 4, mesh.tp);
    expect_refusal(
        [&] {
          words.forward(at::full({2, 3}, 11, at::kLong));
        },
        {"11 to 11", "there are 11 words"});
    const at::Tensor logits = random(1, {2, world->rank() == 0 ? 6 : 5});
    expect_refusal(
        [&] { parallel::vocab_parallel_cross_entropy(logits, at::full({2}, 11, at::kLong), 11, mesh.tp); },
        {"target of row 0 is 11"});
    expect_refusal(
        [&] { parallel::vocab_parallel_cross_entropy(logits, at::zeros({3}, at::kLong), 11, mesh.tp); },
        {"2 rows of logits, but 3 targets"});
  });
}

TEST(TensorLayers, RanksOfAGroupReadOneBatch) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const parallel::VocabParallelEmbedding words(12, 4, mesh.tp);
    const at::Tensor alike = at::arange(6).view({2, 3}), logits = random(1, {6, 6});
    for (const at::Tensor& other : {at::Tensor(alike + world->rank()), alike.roll(world->rank())}) {
      expect_refusal([&] { words.forward(other); }, {"ranks 0 and 1", "different indices", "same batch"});
      expect_refusal([&] { parallel::vocab_parallel_cross_entropy(logits, other.flatten(), 12, mesh.tp); },
                     {"ranks 0 and 1", "different targets", "Mesh::dp_rank"});
    }
    words.forward(alike);
  });
}

/// What goes through split rows and back is where it was, and gradients are those of each rank's part.
TEST(TensorLayers, SplitRowsAreTheRowsOneRankAfterAnother) {
  run_ranks(4, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const parallel::SplitRows split(mesh.tp);
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{8, 3}, {2, 4, 3}, {2, 2, 4, 3}}) {
      const at::Tensor x = random(1, shape).requires_grad_();
      const at::Tensor mine = split.forward(x);
      EXPECT_TRUE(
          at::equal(mine.reshape({-1, 3}), x.reshape({-1, 3}).chunk(4)[static_cast<size_t>(world->rank())]));
      const at::Tensor again = split.join(mine * 2.0);
      EXPECT_TRUE(at::equal(again, x * 2.0));
      const at::Tensor factor = random(2, shape);
      (again * (world->rank() == 0 ? factor : at::zeros_like(factor))).sum().backward();
      at::Tensor sum = x.grad().clone();
      mesh.tp->all_reduce(sum, comm::ReduceOp::kSum);
      EXPECT_TRUE(at::allclose(sum, factor * 2.0));
    }
    expect_refusal([&] { split.forward(random(1, {2, 6, 3})); }, {"(2, 6, 3)", "over 4 ranks", "pad it"});
  });
}

/// With split rows backward gathers again what forward has gathered: a rank keeps its own rows.
TEST(TensorLayers, AColumnLayerKeepsNoGatheredRows) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const auto layer = seeded([&] {
      return std::make_shared<ColumnLinear>(6, 8, mesh.tp, parallel::ColumnOptions{.rows = Rows::kSplit});
    });
    const auto whole = seeded([] { return std::make_shared<torch::nn::LinearImpl>(6, 8); });
    const at::Tensor x = random(1, {4, 6}), dy = random(2, {4, 8});
    const auto rank = static_cast<size_t>(world->rank());
    const at::Tensor plain_x = x.clone().requires_grad_(), mine = x.chunk(2)[rank].clone().requires_grad_();
    const at::Tensor wanted = whole->forward(plain_x), y = layer->forward(mine);
    EXPECT_TRUE(at::allclose(y, wanted.chunk(2, 1)[rank]));
    const auto gathers = [&] { return mesh.tp->traffic().at(plan::Collective::kAllGather).calls; };
    const int64_t before = gathers();
    wanted.backward(dy);
    y.backward(dy.chunk(2, 1)[rank]);
    EXPECT_EQ(gathers(), before + 1);
    EXPECT_LT(relative_error(mine.grad(), plain_x.grad().chunk(2)[rank]), 1e-6);
    EXPECT_LT(relative_error(layer->weight.grad(), whole->weight.grad().chunk(2)[rank]), 1e-6);
    EXPECT_LT(relative_error(layer->bias.grad(), whole->bias.grad().chunk(2)[rank]), 1e-6);
  });
}

TEST(TensorLayers, SizesThatCannotBeCutAreRefusedWithTheNumbersThatCan) {
  run_ranks(4, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const auto& tp = mesh.tp;
    expect_refusal([&] { ColumnLinear(8, 18, tp); },
                   {"4 ranks cannot share 18 out features", "1, 2, 3, 6, 9, 18"});
    expect_refusal([&] { RowLinear(18, 8, tp); }, {"18 in features", "1, 2, 3, 6, 9, 18"});
    expect_refusal([&] { ColumnLinear(8, 24, tp, {.heads = 6}); }, {"cannot share 6 heads", "1, 2, 3, 6"});
    expect_refusal([&] { RowLinear(24, 8, tp, {.heads = 6}); }, {"cannot share 6 heads", "1, 2, 3, 6"});
    expect_refusal([&] { ColumnLinear(8, 24, tp, {.heads = 5}); },
                   {"24 out features", "not those of 5 heads"});
    expect_refusal([&] { ColumnLinear(8, 24, tp, {.packed = 5}); }, {"packed is 5 for 24 out features"});
    expect_refusal([&] { ColumnLinear(8, 24, tp, {.packed = 3, .uneven = true}); },
                   {"packed is 3", "uneven"});
    expect_refusal([&] { ColumnLinear(0, 24, tp); }, {"sizes are 0 and 24"});
    expect_refusal([&] { ColumnLinear(8, 3, tp, {.uneven = true}); }, {"a vocabulary of 3"});
    expect_refusal([&] { parallel::VocabParallelEmbedding(3, 8, tp); }, {"a vocabulary of 3"});
    expect_refusal([&] { RowLinear(8, 8, nullptr); }, {"no group", "Mesh::tp"});
    expect_refusal([&] { RowLinear(8, 8, tp).forward(random(1, {2, 8})); }, {"x is (2, 8)", "2 features"});
    expect_refusal([&] { ColumnLinear(8, 8, tp).forward(random(1, {2, 7})); }, {"x is (2, 7)", "8 features"});
    expect_refusal(
        [&] {
          RowLinear(8, 8, tp, {.rows = Rows::kSplit}).forward(random(1, {6, 2}));
        },
        {"rows of (6, 8)", "over 4 ranks"});
  });
}

/// A layer of one feature is one still: a gate, or a score.
TEST(TensorLayers, LayersOfOneFeatureAreThoseOfTorch) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const auto rank = static_cast<size_t>(world->rank());
    const auto column = seeded([&] { return std::make_shared<ColumnLinear>(1, 4, mesh.tp); });
    const auto column_whole = seeded([] { return std::make_shared<torch::nn::LinearImpl>(1, 4); });
    const at::Tensor x = random(1, {3, 1});
    EXPECT_TRUE(at::allclose(column->forward(x), column_whole->forward(x).chunk(2, 1)[rank]));
    const auto row = seeded([&] { return std::make_shared<RowLinear>(4, 1, mesh.tp); });
    const auto row_whole = seeded([] { return std::make_shared<torch::nn::LinearImpl>(4, 1); });
    const at::Tensor y = random(2, {3, 4});
    EXPECT_TRUE(at::allclose(row->forward(y.chunk(2, 1)[rank]), row_whole->forward(y), 1e-5, 1e-6));
    for (const auto& [in, out] : {std::pair<int64_t, int64_t>{1, 0}, {0, 2}})
      expect_refusal([&] { ColumnLinear(in, out, mesh.tp); }, {fmt::format("sizes are {} and {}", in, out)});
  });
}

/// A module that says what is not so.
struct Liar : torch::nn::Module, parallel::HasParts {
  explicit Liar(std::map<std::string, plan::Part> says, uint64_t seed = 1) : said(std::move(says)) {
    weight = register_parameter("weight", random(seed, {4, 3}));
  }
  std::map<std::string, plan::Part> parts() const override { return said; }
  at::Tensor weight;
  std::map<std::string, plan::Part> said;
};

TEST(TensorLayers, PartsThatAreNotSoAreRefused) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const auto refuses = [&](const std::map<std::string, plan::Part>& says,
                             const std::vector<std::string>& words) {
      Liar liar(says);
      expect_refusal([&] { parallel::fully_shard(liar, mesh); }, words);
      expect_refusal([&] { parallel::data_parallel(liar, mesh); }, words);
    };
    refuses({{"other", {.whole = {8, 3}, .start = {0, 0}}}}, {"a part of other", "no such parameter"});
    refuses({{"weight", {.whole = {7, 3}, .start = {4, 0}}}},
            {"said to be a part of [7, 3]", "reaches outside"});
    refuses({{"weight", {.whole = {8, 3}, .start = {0, 0}}}},
            {"2 ranks along tp have parts of weight", "occur twice", "Mesh::tp"});
    refuses({{"weight", {.whole = {12, 3}, .start = {4 * world->rank(), 0}}}},
            {"elements 24 to 36 are missing"});
    // A copy whose gradients nobody adds up.
    refuses({{"weight", {.copies = 1, .copy = world->rank()}}},
            {"copy 0 of 1 copies of weight", "leave out of parts() what all ranks have whole"});
    // Draws of one generator.
    refuses({{"weight", {.whole = {8, 3}, .start = {4 * world->rank(), 0}}}},
            {"ranks 0 and 1 along tp have different parts of weight", "the same values", "load_weights()"});
  });
}

TEST(TensorLayers, CopiesAreThoseOfNeighbours) {
  run_ranks(4, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const int64_t rank = world->rank();
    const auto liar = [&](int64_t rows, int64_t copies, int64_t copy) {
      const plan::Part part{.whole = {8, 3}, .start = {rows, 0}, .copies = copies, .copy = copy};
      return std::make_shared<Liar>(std::map<std::string, plan::Part>{{"weight", part}},
                                    static_cast<uint64_t>(rows) + 1);
    };
    const auto refuses = [&](const std::shared_ptr<Liar>& net, const std::vector<std::string>& words) {
      expect_refusal([&] { parallel::fully_shard(*net, mesh); }, words);
    };
    // Those of ranks 0 and 2, and of ranks 1 and 3.
    refuses(liar(4 * (rank % 2), 2, rank / 2), {"rank 1 of 4 along tp", "copy 0 of 2 copies of weight"});
    refuses(liar(4 * (rank % 2), 2, rank % 2),
            {"rank 1 of 4", "begins at [4, 0]", "neighbours with one box"});
    refuses(liar(4 * (rank / 2), 3, rank % 3), {"3 copies of weight", "divide the ranks"});
    refuses(liar(4 * (rank / 2), 0, 0), {"0 copies of weight"});
    EXPECT_NO_THROW(parallel::fully_shard(*liar(4 * (rank / 2), 2, rank % 2), mesh));
  });
}

/// As the slopes of a rank's heads are, which those of rank 0 would take the place of.
TEST(TensorLayers, BuffersOfARanksPartAreRefused) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const auto layer = seeded([&] { return std::make_shared<RowLinear>(4, 2, mesh.tp); });
    layer->register_buffer("mask", at::ones({3}));
    at::Tensor& slopes = layer->register_buffer("slopes", at::full({2}, world->rank()));
    expect_refusal([&] { parallel::fully_shard(*layer, mesh); },
                   {"ranks 0 and 1 along tp", "the buffer slopes", "plain member"});
    slopes.fill_(1);
    const auto engine = parallel::fully_shard(*layer, mesh);
    slopes.fill_(world->rank());
    parallel::sync_buffers(*layer, mesh);
    EXPECT_EQ(slopes[0].item<int64_t>(), world->rank());
  });
}

/// 5 words on 2 ranks are 3 and 2, so that a rank alone would choose other units.
TEST(TensorLayers, RanksWithUnevenPartsChooseTheSameUnits) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const auto net = std::make_shared<torch::nn::Module>();
    const auto words =
        seeded([&] { return std::make_shared<parallel::VocabParallelEmbedding>(5, 8, mesh.tp); });
    net->register_module("words", words);
    for (const int64_t least : {16, 20, 24}) {
      const auto engine = parallel::fully_shard(*net, mesh, {.min_unit_numel = least});
      EXPECT_EQ(engine->units().front()->name() == "words", least <= 20) << least;
    }
  });
}

/// A layer that was cut over the ranks of data holds parts that no rank of the mesh has the rest of.
TEST(TensorLayers, TheGroupOfAnotherAxisIsRefused) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, 2));
    ColumnLinear layer(4, 8, mesh.dp);
    expect_refusal([&] { parallel::fully_shard(layer, mesh); },
                   {"the 1 ranks along tp have parts of", "Mesh::tp"});
  });
}

TEST(TensorLayers, RanksThatShareLayersNeedOneLoss) {
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = tensor_mesh(world);
    const auto layer = seeded([&] { return std::make_shared<RowLinear>(4, 2, mesh.tp); });
    const auto engine = parallel::data_parallel(*layer, mesh);
    const at::Tensor loss = layer->forward(random(1, {3, 2})).square().mean();
    for (int times = 0; times < 2; ++times) {
      expect_refusal([&] { engine->backward(loss + static_cast<double>(world->rank())); },
                     {"ranks 0 and 1 share layers", "Mesh::dp_rank"});
    }
    for (const double factor : {1.001, std::numeric_limits<double>::quiet_NaN()})
      expect_refusal([&] { engine->backward(world->rank() == 0 ? loss : loss * factor); },
                     {"their losses are"});
    engine->backward(loss);
    for (const parallel::Hook hook : {parallel::Hook::kTopK, parallel::Hook::kPowerSgd}) {
      RowLinear other(4, 2, mesh.tp);
      expect_refusal([&] { parallel::data_parallel(other, mesh, {.hook = {.hook = hook}}); },
                     {"hook is", "would drift apart"});
    }
  });
}

}  // namespace
}  // namespace trireme::test
