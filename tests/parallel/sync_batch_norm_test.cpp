// Batch normalisation over ranks, against at::batch_norm of one process on the whole batch.
#include "trireme/parallel/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "tests/parallel/plain_net.h"
#include "tests/support/refusal.h"
#include "tests/support/spawn.h"
#include "trireme/base/error.h"
#include "trireme/parallel/wrap.h"

namespace trireme {
namespace {

using comm::Group;
using comm::World;
using parallel::SyncBatchNorm;
using parallel::SyncBatchNormOptions;
using test::expect_refusal;
using test::kBatch;
using test::kSteps;
using test::random;
using test::run_ranks;
using test::Weights;
using Counts = std::vector<int64_t>;  // rows of the batch, by rank

std::shared_ptr<Group> group_of(const std::shared_ptr<World>& world) {
  std::vector<int64_t> ranks(static_cast<size_t>(world->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world->make_group("batch_norm", ranks);
}

int64_t calls(const Group& group) {
  int64_t sum = 0;
  for (const auto& [kind, traffic] : group.traffic()) sum += traffic.calls;
  return sum;
}

/// What one normalisation gives.
struct Outcome {
  at::Tensor y, dx, d_weight, d_bias, running_mean, running_var;
};

at::Tensor weights(int64_t channels) {
  return random(50, {channels}) + 1.5;
}
at::Tensor biases(int64_t channels) {
  return random(51, {channels});
}

/// One process in fp64, from running statistics of zeros and ones.
Outcome on_whole_batch(const at::Tensor& x_in, const at::Tensor& dy, double momentum = 0.1) {
  const int64_t channels = x_in.size(1);
  const at::Tensor x = x_in.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).requires_grad_();
  const at::Tensor weight = weights(channels).to(at::kDouble).requires_grad_();
  const at::Tensor bias = biases(channels).to(at::kDouble).requires_grad_();
  const at::Tensor mean = at::zeros({channels}, at::kDouble), var = at::ones({channels}, at::kDouble);
  const at::Tensor y = at::batch_norm(x, weight, bias, mean, var, true, momentum, 1e-5, false);
  y.backward(dy.to(at::kDouble));
  return {y.detach(), x.grad(), weight.grad(), bias.grad(), mean, var};
}

/// The same on ranks of which each has its rows; outputs put together, gradients of parameters added up.
Outcome on_ranks(const at::Tensor& x, const at::Tensor& dy, const Counts& counts,
                 const SyncBatchNormOptions& options = {}) {
  const auto xs = x.split_with_sizes(counts), dys = dy.split_with_sizes(counts);
  std::vector<Outcome> parts(counts.size());
  run_ranks(static_cast<int64_t>(counts.size()), [&](std::shared_ptr<World> world) {
    const auto rank = static_cast<size_t>(world->rank());
    SyncBatchNorm norm(x.size(1), group_of(world), options);
    norm.weight.data().copy_(weights(x.size(1)));
    norm.bias.data().copy_(biases(x.size(1)));
    const at::Tensor part = xs[rank].clone(at::MemoryFormat::Preserve).requires_grad_();
    const at::Tensor y = norm.forward(part);
    y.backward(dys[rank]);
    parts[rank] = {y.detach(),       part.grad(),       norm.weight.grad(),
                   norm.bias.grad(), norm.running_mean, norm.running_var};
  });
  std::vector<at::Tensor> y, dx;
  Outcome whole = parts.front();
  whole.d_weight = at::zeros_like(whole.d_weight);
  whole.d_bias = at::zeros_like(whole.d_bias);
  for (const Outcome& part : parts) {
    y.push_back(part.y);
    dx.push_back(part.dx);
    whole.d_weight += part.d_weight;
    whole.d_bias += part.d_bias;
    EXPECT_TRUE(at::equal(part.running_mean, whole.running_mean)) << "equal bits on every rank";
    EXPECT_TRUE(at::equal(part.running_var, whole.running_var)) << "equal bits on every rank";
  }
  whole.y = at::cat(y);
  whole.dx = at::cat(dx);
  return whole;
}

void expect_close_outcome(const at::Tensor& got, const at::Tensor& wanted, double tolerance,
                          const std::string& what) {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  const double difference = (got.to(at::kDouble) - wanted).norm().item<double>();
  EXPECT_LE(difference, tolerance * wanted.norm().item<double>()) << what;
}

void expect_close_outcome(const Outcome& got, const Outcome& wanted, double tolerance,
                          const std::string& what) {
  expect_close_outcome(got.y, wanted.y, tolerance, what + ": y");
  expect_close_outcome(got.dx, wanted.dx, tolerance, what + ": dx");
  expect_close_outcome(got.d_weight, wanted.d_weight, tolerance, what + ": d_weight");
  expect_close_outcome(got.d_bias, wanted.d_bias, tolerance, what + ": d_bias");
  expect_close_outcome(got.running_mean, wanted.running_mean, tolerance, what + ": running_mean");
  expect_close_outcome(got.running_var, wanted.running_var, tolerance, what + ": running_var");
}

TEST(SyncBatchNorm, EqualsOneProcessOnTheWholeBatch) {
  at::set_num_threads(1);
  const std::vector<std::vector<int64_t>> shapes = {{12, 5}, {12, 5, 7}, {12, 3, 4, 5}, {12, 3, 2, 3, 2}};
  const std::vector<Counts> splits = {{12}, {6, 6}, {5, 7}, {12, 0}, {0, 3, 9}, {1, 5, 2, 4}, {0, 1, 0, 11}};
  for (const auto& shape : shapes) {
    // Channels and ranks far from each other, so that their means matter.
    const at::Tensor x = random(1, shape) + at::arange(12).view({12, 1}).expand({12, shape[1]}).reshape([&] {
      std::vector<int64_t> leading(shape.size(), 1);
      leading[0] = 12;
      leading[1] = shape[1];
      return leading;
    }());
    const at::Tensor dy = random(2, shape);
    const Outcome wanted = on_whole_batch(x, dy);
    for (const Counts& counts : splits) {
      expect_close_outcome(on_ranks(x, dy, counts), wanted, 2e-6,
                           fmt::format("({}) as {}", fmt::join(shape, ", "), fmt::join(counts, " + ")));
    }
  }
}

TEST(SyncBatchNorm, TakesAnyMemoryLayout) {
  const at::Tensor x = random(1, {8, 3, 4, 5}), dy = random(2, {8, 3, 4, 5});
  const Outcome wanted = on_whole_batch(x, dy);
  expect_close_outcome(on_ranks(x.contiguous(at::MemoryFormat::ChannelsLast), dy, {3, 5}), wanted, 2e-6,
                       "channels last");
  const at::Tensor transposed = x.transpose(0, 3).contiguous().transpose(0, 3);
  expect_close_outcome(on_ranks(transposed, dy, {3, 5}), wanted, 2e-6, "transposed");
}

TEST(SyncBatchNorm, KeepsItsDigitsWhenTheMeanIsLargeAndTheVarianceTiny) {
  // mean(x^2) - mean(x)^2 in fp32 would have no digit left: 1e6 has steps of 0.06, the variance is 0.003.
  const at::Tensor x = 1000.0 + 0.1 * random(1, {64, 4, 9}), dy = random(2, {64, 4, 9});
  const Outcome wanted = on_whole_batch(x, dy, /*momentum=*/1.0);
  const Outcome got = on_ranks(x, dy, {30, 0, 34}, {.momentum = 1.0});
  expect_close_outcome(got, wanted, 1e-3, "large mean");
  expect_close_outcome(got.running_var, wanted.running_var, 1e-4, "large mean: variance");
}

TEST(SyncBatchNorm, TakesHalfPrecisionAndKeepsStatisticsInSingle) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor x = (random(1, {32, 4, 6}) + 3.0).to(dtype), dy = random(2, {32, 4, 6}).to(dtype);
    const Outcome wanted = on_whole_batch(x, dy);
    const Outcome got = on_ranks(x, dy, {20, 12});
    EXPECT_EQ(got.y.scalar_type(), dtype);
    EXPECT_EQ(got.dx.scalar_type(), dtype);
    expect_close_outcome(got, wanted, dtype == at::kHalf ? 5e-4 : 4e-3, c10::toString(dtype));
    expect_close_outcome(got.running_mean, wanted.running_mean, 1e-6, "mean of rounded values");
    expect_close_outcome(got.running_var, wanted.running_var, 1e-6, "variance of rounded values");
  }
}

TEST(SyncBatchNorm, WithoutMomentumAllBatchesWeighTheSame) {
  constexpr int64_t kBatches = 4;
  const at::Tensor x = random(3, {kBatches, 9, 2}) + at::arange(kBatches).view({-1, 1, 1});
  const at::Tensor wanted_mean = x.mean(1).mean(0), wanted_var = x.var(1).mean(0);
  run_ranks(3, [&](std::shared_ptr<World> world) {
    SyncBatchNorm norm(2, group_of(world), {.momentum = std::nullopt});
    for (int64_t batch = 0; batch < kBatches; ++batch) norm.forward(x[batch].chunk(3)[world->rank()]);
    EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), kBatches);
    EXPECT_TRUE(at::allclose(norm.running_mean, wanted_mean, 1e-5, 1e-6));
    EXPECT_TRUE(at::allclose(norm.running_var, wanted_var, 1e-5, 1e-6));
  });
}

TEST(SyncBatchNorm, TalksOnceEachWayAndNotAtAllInEvaluation) {
  run_ranks(3, [](std::shared_ptr<World> world) {
    const auto group = group_of(world);
    SyncBatchNorm norm(4, group);
    const at::Tensor x = (random(5, {6, 4}) + static_cast<double>(world->rank())).requires_grad_();
    const at::Tensor y = norm.forward(x);
    EXPECT_EQ(calls(*group), 1);
    y.square().sum().backward();
    EXPECT_EQ(calls(*group), 2);
    norm.forward(x.detach()).sum().backward();
    EXPECT_EQ(calls(*group), 3) << "nobody asked for the gradient of x";

    norm.eval();
    const at::Tensor mean = norm.running_mean.clone();
    const at::Tensor got = norm.forward(x);
    EXPECT_TRUE(at::equal(got, at::batch_norm(x, norm.weight, norm.bias, norm.running_mean, norm.running_var,
                                              false, 0.1, 1e-5, true)));
    got.sum().backward();
    EXPECT_EQ(calls(*group), 3);
    EXPECT_TRUE(at::equal(norm.running_mean, mean));
  });
}

TEST(SyncBatchNorm, ParametersAndRunningStatisticsAreOptional) {
  const at::Tensor x = random(6, {8, 3, 5});
  const at::Tensor wanted = at::batch_norm(x, {}, {}, {}, {}, true, 0.1, 1e-5, false);
  run_ranks(2, [&](std::shared_ptr<World> world) {
    const auto group = group_of(world);
    SyncBatchNorm norm(3, group, {.affine = false, .track_running_stats = false});
    EXPECT_TRUE(norm.named_parameters().is_empty());
    EXPECT_TRUE(norm.named_buffers().is_empty());
    const auto rank = static_cast<size_t>(world->rank());
    const at::Tensor mine = x.chunk(2)[rank].clone().requires_grad_();
    const at::Tensor y = norm.forward(mine);
    EXPECT_TRUE(at::allclose(y, wanted.chunk(2)[rank], 1e-5, 1e-6));
    y.sum().backward();
    EXPECT_LT(mine.grad().abs().max().item<double>(), 1e-5) << "a shift of all outputs does not depend on x";
    norm.eval();
    EXPECT_TRUE(at::allclose(norm.forward(mine), at::batch_norm(mine, {}, {}, {}, {}, true, 0.1, 1e-5, false),
                             1e-5, 1e-6));
    EXPECT_EQ(calls(*group), 2);
  });
}

TEST(SyncBatchNorm, HasTheNamesOfTorch) {
  run_ranks(1, [](std::shared_ptr<World> world) {
    const SyncBatchNorm norm(3, group_of(world));
    std::vector<std::string> parameters, buffers;
    for (const auto& entry : norm.named_parameters()) parameters.push_back(entry.key());
    for (const auto& entry : norm.named_buffers()) buffers.push_back(entry.key());
    EXPECT_EQ(parameters, (std::vector<std::string>{"weight", "bias"}));
    EXPECT_EQ(buffers, (std::vector<std::string>{"running_mean", "running_var", "num_batches_tracked"}));
  });
}

/// at::batch_norm with the parameters of SyncBatchNorm.
struct BatchNorm : torch::nn::Module {
  explicit BatchNorm(int64_t features) {
    weight = register_parameter("weight", at::ones({features}));
    bias = register_parameter("bias", at::zeros({features}));
    running_mean = register_buffer("running_mean", at::zeros({features}));
    running_var = register_buffer("running_var", at::ones({features}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::batch_norm(x, weight, bias, running_mean, running_var, is_training(), 0.1, 1e-5, true);
  }
  at::Tensor weight, bias, running_mean, running_var;
};

/// Two convolutions, each with its norm, and a head.
template <typename Norm>
struct ConvNet : torch::nn::Module {
  template <typename... Args>
  explicit ConvNet(const Args&... args)
      : norm1(std::make_shared<Norm>(6, args...)), norm2(std::make_shared<Norm>(8, args...)) {
    conv1 = register_parameter("conv1", 0.4 * random(11, {6, 3, 3, 3}));
    register_module("norm1", norm1);
    conv2 = register_parameter("conv2", 0.3 * random(12, {8, 6, 3, 3}));
    register_module("norm2", norm2);
    head = register_parameter("head", 0.3 * random(13, {8, 2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = at::relu(norm1->forward(at::conv2d(x, conv1)));
    return at::matmul(at::relu(norm2->forward(at::conv2d(h, conv2))).mean({2, 3}), head);
  }
  at::Tensor conv1, conv2, head;
  std::shared_ptr<Norm> norm1, norm2;
};

constexpr double kNormRate = 0.1;

at::Tensor images(int64_t step) {
  return random(100 + static_cast<uint64_t>(step), {kBatch, 3, 7, 7});
}
at::Tensor answers(int64_t step) {
  return random(200 + static_cast<uint64_t>(step), {kBatch, 2});
}

template <typename Net>
at::Tensor squared_loss(Net& net, const at::Tensor& x, const at::Tensor& y) {
  return (net.forward(x) - y).square().sum();
}

Weights train_on_one_process() {
  ConvNet<BatchNorm> net;
  for (int64_t step = 0; step < kSteps; ++step) {
    net.zero_grad();
    (squared_loss(net, images(step), answers(step)) / static_cast<double>(kBatch)).backward();
    const at::NoGradGuard no_grad;
    for (auto& param : net.parameters()) param.sub_(param.grad() * kNormRate);
  }
  Weights result;
  for (const auto& entry : net.named_parameters()) result[entry.key()] = entry.value().detach();
  for (const auto& entry : net.named_buffers()) result[entry.key()] = entry.value();
  return result;
}

Weights train_on_ranks(const std::shared_ptr<World>& world, const char* policy, const Counts& counts) {
  const comm::Mesh mesh = comm::make_mesh(world, plan::MeshShape::fit({}, world->size()));
  ConvNet<SyncBatchNorm> net(mesh.dp);
  const bool shards = plan::find_policy(policy).shard_parameters;
  const parallel::WrapOptions options = {.policy = policy, .bucket_mib = 0.0005};
  const auto engine =
      shards ? parallel::fully_shard(net, mesh, options) : parallel::data_parallel(net, mesh, options);
  const auto optimizer = optim::sgd(engine->optimizer_params(), {.lr = kNormRate});
  const auto rank = static_cast<size_t>(mesh.dp_rank);
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor x = images(step).split_with_sizes(counts)[rank];
    const at::Tensor y = answers(step).split_with_sizes(counts)[rank];
    // A sum over no rows is 0 and counts for nothing.
    const auto rows = static_cast<double>(x.size(0));
    engine->backward(squared_loss(net, x, y) / std::max(rows, 1.0), rows);
    engine->step(*optimizer);
  }
  Weights result;
  engine->visit_weights([&](const std::string& name, const at::Tensor& w) { result[name] = w.clone(); });
  for (const auto& entry : net.named_buffers()) {
    if (entry.value().is_floating_point()) result[entry.key()] = entry.value();
  }
  return result;
}

TEST(SyncBatchNorm, AConvolutionalNetTrainsOnRanksAsInOneProcess) {
  at::set_num_threads(1);
  const Weights wanted = train_on_one_process();
  for (const char* policy : {"ddp", "zero2", "fsdp"}) {
    for (const Counts& counts : std::vector<Counts>{{12}, {6, 6}, {7, 0, 5}, {1, 5, 2, 4}}) {
      run_ranks(static_cast<int64_t>(counts.size()), [&](std::shared_ptr<World> world) {
        const Weights got = train_on_ranks(world, policy, counts);
        ASSERT_EQ(got.size(), wanted.size());
        for (const auto& [name, value] : wanted) {
          expect_close_outcome(got.at(name), value, 1e-5,
                               fmt::format("{} with {}: {}", policy, fmt::join(counts, " + "), name));
        }
      });
    }
  }
}

TEST(SyncBatchNorm, RefusesWhatMakesNoSense) {
  run_ranks(2, [](std::shared_ptr<World> world) {
    const auto group = group_of(world);
    const std::string place = "[parallel.sync_batch_norm]";
    expect_refusal([&] { SyncBatchNorm(0, group); }, {place, "features is 0", "at least 1"});
    expect_refusal([&] { SyncBatchNorm(4, nullptr); }, {place, "no group", "Mesh::dp"});
    expect_refusal([&] { SyncBatchNorm(4, group, {.eps = -1.0}); }, {place, "eps is -1"});
    expect_refusal([&] { SyncBatchNorm(4, group, {.momentum = 1.5}); }, {place, "momentum is 1.5", "0 to 1"});

    SyncBatchNorm norm(4, group);
    expect_refusal([&] { norm.forward(at::ones({4})); }, {place, "shape (4)", "(N, 4)"});
    expect_refusal([&] { norm.forward(at::ones({2, 3, 4})); }, {place, "(2, 3, 4)", "(N, 4, ...)"});
    expect_refusal([&] { norm.forward(at::ones({2, 4}, at::kDouble)); }, {place, "Double", "fp32"});
    EXPECT_EQ(calls(*group), 0) << "refused before the others are asked";

    const at::Tensor one_in_all = at::ones({world->rank() == 0 ? 1 : 0, 4});
    expect_refusal([&] { norm.forward(one_in_all); },
                   {place, "2 ranks", "1 values per channel", "larger batch"});
    expect_refusal([&] { norm.forward(at::ones({0, 4})); }, {place, "0 values per channel"});
    EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 0) << "running statistics are as they were";
    EXPECT_NO_THROW(norm.forward(at::ones({1, 4})));

    const at::Tensor x = random(5, {6, 4}).requires_grad_();
    const at::Tensor loss = norm.forward(x).square().sum();
    expect_refusal(
        [&] { torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true); },
        {place, "create_graph"});
  });
}

}  // namespace
}  // namespace trireme
