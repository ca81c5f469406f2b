// A transformer of one's own whose layers are cut over ranks, against the plain one in one process.
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/parallel/own_transformer.h"
#include "tests/support/refusal.h"
#include "tests/support/relative_error.h"
#include "tests/support/spawn.h"
#include "trireme/base/file.h"
#include "trireme/state/state_file.h"
#include "trireme/tensor/redistribute.h"

namespace trireme::test {
namespace {

using comm::World;
using parallel::Rows;

struct MeshCase {
  int64_t tp, dp;
  Rows rows;
  std::string label() const {
    return fmt::format("tp {} x dp {}, {} rows", tp, dp, rows == Rows::kAll ? "all" : "split");
  }
};

std::vector<MeshCase> mesh_cases() {
  std::vector<MeshCase> all;
  for (const int64_t tp : {1, 2, 4}) {
    for (const int64_t dp : {1, 2}) {
      for (const Rows rows : {Rows::kAll, Rows::kSplit}) all.push_back({tp, dp, rows});
    }
  }
  return all;
}

comm::Mesh mesh_for(const std::shared_ptr<World>& world, const MeshCase& at, int64_t replicas = 1) {
  plan::ParallelConfig axes;
  axes.tp = at.tp;
  axes.dp_replicate = replicas;
  return comm::make_mesh(world, plan::MeshShape::fit(axes, world->size()));
}

std::unique_ptr<parallel::DataParallel> wrap_net(torch::nn::Module& net, const comm::Mesh& mesh,
                                                 const std::string& policy,
                                                 at::ScalarType compute = at::kFloat) {
  const parallel::WrapOptions options = {.policy = policy, .compute = compute, .reduce = compute};
  return plan::find_policy(policy).shard_parameters ? parallel::fully_shard(net, mesh, options)
                                                    : parallel::data_parallel(net, mesh, options);
}

std::shared_ptr<CutTransformer> cut_net(const comm::Mesh& mesh, Rows rows, bool tied = false) {
  return seeded([&] { return std::make_shared<CutTransformer>(mesh.tp, rows, tied); });
}

/// The loss of this rank's sequences, and its share of all rows that count.
struct Share {
  at::Tensor loss;
  double weight;
};
Share loss_at(CutTransformer& net, const comm::Mesh& mesh, int64_t step) {
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  const at::Tensor wanted = wanted_at(step).chunk(mesh.dp->size())[rank];
  return {net.loss(words_at(step).chunk(mesh.dp->size())[rank], wanted),
          wanted.ne(-100).sum().item<double>()};
}

/// What plain training gives: by step the loss and the norm, and the weights of the end.
struct Trained {
  std::vector<double> losses, norms;
  Weights first_gradients, weights;
};

template <typename Optimizer, typename Options>
Trained plain_training(const Options& options, bool tied = false) {
  const auto net = seeded([&] { return std::make_shared<PlainTransformer>(tied); });
  Optimizer optimizer(net->parameters(), options);
  Trained trained;
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = net->loss(words_at(step), wanted_at(step));
    loss.backward();
    if (step == 0) {
      for (const auto& [name, param] : parameters_of(*net))
        trained.first_gradients[name] = param.grad().clone();
    }
    trained.losses.push_back(loss.item<double>());
    trained.norms.push_back(torch::nn::utils::clip_grad_norm_(net->parameters(), 0.5));
    optimizer.step();
  }
  trained.weights = copies(parameters_of(*net));
  return trained;
}

/// Expects the gradient of what a rank holds of each parameter to be that piece of the plain one.
void expect_gradients(parallel::DataParallel& engine, const std::vector<at::Tensor>& pieces,
                      const Weights& wanted, const std::string& what) {
  size_t next = 0;
  for (const auto& unit : engine.units()) {
    for (const plan::FlatEntry& entry : unit->layout().entries()) {
      const plan::Region region = entry.region({0, entry.numel});
      at::Tensor piece = wanted.at(entry.name).view(region.shape_in(entry.whole_shape()));
      for (size_t dim = 0; dim < region.start.size(); ++dim)
        piece = piece.narrow(static_cast<int64_t>(dim), region.start[dim], region.extent[dim]);
      EXPECT_LT(relative_error(pieces.at(next++).grad(), piece.reshape(entry.shape)), 1e-5)
          << what << ": gradient of " << entry.name;
    }
  }
}

/// A bias of keys moves all scores of a query alike, so that its gradient is rounding alone, which AdamW
/// takes for a gradient.
at::Tensor without_keys(const std::string& name, const at::Tensor& weight) {
  if (!name.ends_with("qkv.bias")) return weight;
  const auto packed = weight.chunk(3);
  return at::cat({packed[0], packed[2]});
}

template <typename Optimizer, typename Options>
void expect_trains_alike(const MeshCase& at, const std::string& policy, const Options& options,
                         const Trained& plain, double bound, bool tied = false) {
  run_ranks(at.tp * at.dp, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_for(world, at);
    const auto net = cut_net(mesh, at.rows, tied);
    const auto engine = wrap_net(*net, mesh, policy);
    const std::vector<at::Tensor> pieces = engine->optimizer_tensors();
    Optimizer optimizer(pieces, options);
    const std::string what = at.label() + ", " + policy;
    for (int64_t step = 0; step < kSteps; ++step) {
      const Share share = loss_at(*net, mesh, step);
      engine->backward(share.loss, share.weight);
      const auto at_step = static_cast<size_t>(step);
      if (at.dp == 1) {
        EXPECT_NEAR(share.loss.item<double>(), plain.losses[at_step], bound * plain.losses[at_step]) << what;
      }
      if (step == 0 && policy == "ddp") expect_gradients(*engine, pieces, plain.first_gradients, what);
      EXPECT_NEAR(engine->clip_grad_norm(0.5), plain.norms[at_step], 10 * bound * plain.norms[at_step])
          << what << ", step " << step;
      engine->step(optimizer);
    }
    const Weights got = weights_of(*engine);
    ASSERT_EQ(got.size(), plain.weights.size());
    for (const auto& [name, weight] : plain.weights)
      EXPECT_LT(relative_error(without_keys(name, got.at(name)), without_keys(name, weight)), bound)
          << what << ": " << name;
  });
}

TEST(OwnTransformer, TrainsUnderSgdOnEveryMeshAsThePlainOne) {
  const torch::optim::SGDOptions options(0.3);
  const Trained plain = plain_training<torch::optim::SGD>(options);
  for (const MeshCase& at : mesh_cases()) {
    for (const char* policy : {"ddp", "fsdp"})
      expect_trains_alike<torch::optim::SGD>(at, policy, options, plain, 1e-5);
  }
}

TEST(OwnTransformer, TrainsUnderAdamWOnEveryMeshAsThePlainOne) {
  const torch::optim::AdamWOptions options(1e-3);
  const Trained plain = plain_training<torch::optim::AdamW>(options);
  for (const MeshCase& at : mesh_cases())
    expect_trains_alike<torch::optim::AdamW>(at, at.dp == 1 ? "zero2" : "fsdp", options, plain, 1e-4);
}

/// Rows of the embedding are a rank's part of the head, whose logits need all rows of the activation.
TEST(OwnTransformer, TrainsWithTheEmbeddingAsItsHeadAsThePlainOne) {
  const torch::optim::SGDOptions options(0.3);
  const Trained plain = plain_training<torch::optim::SGD>(options, /*tied=*/true);
  for (const Rows rows : {Rows::kAll, Rows::kSplit})
    expect_trains_alike<torch::optim::SGD>({2, 2, rows}, "fsdp", options, plain, 1e-5, /*tied=*/true);
}

/// Trains with two micro-batches a step under an optimizer of ours, and returns the digest.
std::string digest_of(const comm::Mesh& mesh, Rows rows, const std::string& policy, at::ScalarType compute) {
  const auto net = cut_net(mesh, rows);
  const auto engine = wrap_net(*net, mesh, policy, compute);
  const auto optimizer = optim::adamw(engine->optimizer_params(), {.lr = 1e-3});
  for (int64_t step = 0; step < 3; ++step) {
    const Share first = loss_at(*net, mesh, 2 * step), second = loss_at(*net, mesh, 2 * step + 1);
    engine->accumulate(first.loss, first.weight);
    engine->backward(second.loss, second.weight);
    engine->clip_grad_norm(0.5);
    engine->step(*optimizer);
  }
  return parallel::weights_digest(*engine);
}

TEST(OwnTransformer, EveryPolicyEndsWithOneDigest) {
  for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) {
    for (const Rows rows : {Rows::kAll, Rows::kSplit}) {
      std::set<std::string> digests;
      std::mutex mutex;
      for (const char* policy :
           {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op", "fsdp:hybrid_shard"}) {
        const int64_t replicas = policy == std::string("fsdp:hybrid_shard") ? 2 : 1;
        run_ranks(4, [&](std::shared_ptr<World> world) {
          const comm::Mesh mesh = mesh_for(world, {2, 2, rows}, replicas);
          const std::string digest = digest_of(mesh, rows, policy, compute);
          const std::lock_guard lock(mutex);
          digests.insert(digest);
        });
      }
      EXPECT_EQ(digests.size(), 1) << c10::toString(compute);
    }
  }
}

/// In bf16 as far from the plain one as a rank alone is, and not further.
TEST(OwnTransformer, InBf16ItLearnsWhatOneRankLearns) {
  const auto last_loss = [](const MeshCase& at) {
    double last = 0.0;
    run_ranks(at.tp, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_for(world, at);
      const auto net = cut_net(mesh, at.rows);
      const auto engine = wrap_net(*net, mesh, "fsdp", at::kBFloat16);
      const auto optimizer = optim::adamw(engine->optimizer_params(), {.lr = 3e-3});
      for (int64_t step = 0; step < 30; ++step) {
        const Share share = loss_at(*net, mesh, 0);
        engine->backward(share.loss, share.weight);
        engine->step(*optimizer);
        if (world->rank() == 0) last = share.loss.item<double>();
      }
    });
    return last;
  };
  const double alone = last_loss({1, 1, Rows::kAll});
  EXPECT_LT(alone, 2.0);
  for (const Rows rows : {Rows::kAll, Rows::kSplit})
    EXPECT_NEAR(last_loss({4, 1, rows}), alone, 0.05 * alone);
}

/// Steps of training from `from` on; what is saved at the end, and the digest of the weights.
std::string train_on(const MeshCase& at, int64_t from, const std::string& load, const std::string& save) {
  std::string digest;
  run_ranks(at.tp * at.dp, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_for(world, at);
    const auto net = cut_net(mesh, at.rows);
    const auto engine = wrap_net(*net, mesh, "fsdp");
    const auto optimizer = optim::adamw(engine->optimizer_params(), {.lr = 1e-3});
    if (!load.empty()) state::load_state(*engine, *optimizer, load);
    if (from < 0) {
      state::save_state(*engine, *optimizer, save);
      return;
    }
    for (int64_t step = from; step < from + 2; ++step) {
      const Share share = loss_at(*net, mesh, step);
      engine->backward(share.loss, share.weight);
      engine->step(*optimizer);
    }
    state::save_state(*engine, *optimizer, save);
    const std::string mine = parallel::weights_digest(*engine);
    if (world->rank() == 0) digest = mine;
  });
  return digest;
}

TEST(OwnTransformer, AStateOfOneMeshLoadsOnAnother) {
  const std::string folder = testing::TempDir() + "own_transformer_state";
  std::filesystem::create_directories(folder);
  const std::vector<MeshCase> meshes = {
      {1, 2, Rows::kAll}, {2, 1, Rows::kSplit}, {2, 2, Rows::kAll}, {4, 1, Rows::kSplit}};
  for (const MeshCase& at : meshes) {
    const std::string saved = folder + "/saved";
    train_on(at, 0, "", saved);
    for (const MeshCase& other : meshes) {
      train_on(other, -1, saved, folder + "/again");
      EXPECT_EQ(read_file(folder + "/again"), read_file(saved)) << at.label() << ", " << other.label();
    }
    EXPECT_EQ(train_on(at, 2, saved, folder + "/more"), train_on(at, 2, saved, folder + "/more"));
  }
  std::filesystem::remove_all(folder);
}

/// The plain module reads what cut ones save, and they what it saves.
TEST(OwnTransformer, FilesHoldWholeTensorsUnderTorchsNames) {
  const std::string path = testing::TempDir() + "own_transformer.safetensors";
  const auto plain = seeded([] { return std::make_shared<PlainTransformer>(); });
  {
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : plain->parameters()) param.mul_(1.5).add_(0.01);
  }
  const Weights wanted = copies(parameters_of(*plain));
  state::save_weights(*plain, path);
  run_ranks(4, [&](std::shared_ptr<World> world) {
    const comm::Mesh mesh = mesh_for(world, {4, 1, Rows::kAll});
    const auto net = cut_net(mesh, Rows::kAll);
    state::load_weights(*net, path);
    expect_refusal([&] { state::save_weights(*net, path + ".part"); }, {"has a part of", "wrap it"});
    const auto engine = wrap_net(*net, mesh, "fsdp");
    const Weights got = weights_of(*engine);
    for (const auto& [name, weight] : wanted) EXPECT_TRUE(at::equal(got.at(name), weight)) << name;
    state::save_weights(*engine, path + ".cut");
  });
  const auto other = seeded([] { return std::make_shared<PlainTransformer>(); });
  state::load_weights(*other, path + ".cut");
  for (const auto& [name, weight] : parameters_of(*other)) EXPECT_TRUE(at::equal(weight, wanted.at(name)));
  std::filesystem::remove(path);
  std::filesystem::remove(path + ".cut");
}

TEST(OwnTransformer, InitialValuesDoNotDependOnTheMesh) {
  const auto plain = seeded([] { return std::make_shared<PlainTransformer>(); });
  for (const MeshCase& at : mesh_cases()) {
    run_ranks(at.tp * at.dp, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_for(world, at);
      const auto net = cut_net(mesh, at.rows);
      const auto engine = wrap_net(*net, mesh, "ddp");
      const Weights got = weights_of(*engine);
      for (const auto& [name, weight] : parameters_of(*plain))
        EXPECT_TRUE(at::equal(got.at(name), weight)) << at.label() << ": " << name;
    });
  }
}

/// A row layer with one of its placements wrong; the sum of its terms has a gradient that is whole already.
struct Wrong : parallel::RowLinear {
  Wrong(const std::shared_ptr<comm::Group>& sums, bool forgets)
      : RowLinear(2 * kWidth, kWidth, sums, {.bias = false}), group(sums), forgets_gradient(forgets) {}
  at::Tensor forward(const at::Tensor& x) const {
    using P = plan::TensorPlacement;
    return tensor::redistribute(at::linear(x, weight), {P::partial(), P::replicate()},
                                {P::replicate(), forgets_gradient ? P::replicate() : P::partial()}, group);
  }
  std::shared_ptr<comm::Group> group;
  bool forgets_gradient;
};

/// x + down(gelu(up(norm(x)))), twice, with a plain head behind it.
struct Faulty : torch::nn::Module {
  Faulty(const std::shared_ptr<comm::Group>& group, bool forgets) {
    for (const char* each : {"0", "1"}) {
      norms.push_back(register_module(std::string("norm") + each, layer_norm(kWidth)));
      ups.push_back(register_module(std::string("up") + each,
                                    std::make_shared<parallel::ColumnLinear>(kWidth, 2 * kWidth, group)));
      downs.push_back(register_module(std::string("down") + each, std::make_shared<Wrong>(group, forgets)));
    }
    head = register_module("head", torch::nn::Linear(kWidth, 3));
  }
  at::Tensor loss(at::Tensor x) {
    for (size_t i = 0; i < 2; ++i) x = x + downs[i]->forward(at::gelu(ups[i]->forward(norms[i](x))));
    return head(x).square().mean();
  }
  std::vector<torch::nn::LayerNorm> norms;
  std::vector<std::shared_ptr<parallel::ColumnLinear>> ups;
  std::vector<std::shared_ptr<Wrong>> downs;
  torch::nn::Linear head{nullptr};
};

/// The largest error of a weight after three steps on `tp` ranks, beside one rank.
double error_of_weights(int64_t tp, bool forgets) {
  const auto train_it = [&](int64_t ranks) {
    Weights weights;
    run_ranks(ranks, [&](std::shared_ptr<World> world) {
      const comm::Mesh mesh = mesh_for(world, {ranks, 1, Rows::kAll});
      const auto net = seeded([&] { return std::make_shared<Faulty>(mesh.tp, forgets); });
      const auto engine = parallel::fully_shard(*net, mesh);
      const auto optimizer = optim::build(descent(0.3), engine->optimizer_params());
      for (int64_t step = 0; step < 3; ++step) {
        engine->backward(net->loss(random(static_cast<uint64_t>(step), {6, kWidth})));
        engine->step(*optimizer);
      }
      const Weights got = weights_of(*engine);
      if (world->rank() == 0) weights = got;
    });
    return weights;
  };
  const Weights wanted = train_it(1), got = train_it(tp);
  double worst = 0.0;
  for (const auto& [name, weight] : wanted) worst = std::max(worst, relative_error(got.at(name), weight));
  return worst;
}

/// A plain head and a plain loss behind cut layers count once, and a share of a gradient that is taken for
/// all of it is seen.
TEST(OwnTransformer, AShareOfAGradientIsNotAllOfIt) {
  for (const int64_t tp : {2, 4}) {
    EXPECT_LT(error_of_weights(tp, /*forgets=*/false), 1e-5);
    EXPECT_GT(error_of_weights(tp, /*forgets=*/true), 1e-3);
  }
}

}  // namespace
}  // namespace trireme::test
