// Linear layers that multiply with weights in NF4: the bits of layers that have the decoded weights, and the
// losses of the same network written with operators of ATen.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <limits>
#include <memory>
#include <vector>

#include "trireme/kernels/nf4.h"
#include "trireme/nn/layers.h"
#include "trireme/nn/linear_parts.h"
#include "trireme/nn/torch_internals.h"

namespace trireme::nn {
namespace {

constexpr int64_t kNf4Width = 36, kNf4Rank = 3;  // of which no matrix is whole blocks
constexpr double kNf4Scale = 2.0;

at::Tensor in_and_out_of_nf4(const at::Tensor& weight, at::Tensor& blocks) {
  blocks = at::empty({(weight.numel() + kNf4Block - 1) / kNf4Block, kNf4Bytes}, at::kByte);
  kernels::nf4_encode(blocks, weight.contiguous().view(-1));
  at::Tensor decoded = at::empty({weight.numel()}, at::kFloat);
  kernels::nf4_decode(decoded, blocks);
  return decoded.view(weight.sizes());
}

/// Three layers on one input, then one with the other layout.
struct Nf4Net {
  std::vector<std::shared_ptr<Linear>> layers;

  Nf4Net(bool lends, bool lengths) {
    const at::NoGradGuard no_grad;
    at::manual_seed(5);
    for (const int64_t out : {20, 12, 12}) layers.push_back(std::make_shared<Linear>(kNf4Width, out, false));
    layers.push_back(std::make_shared<Linear>(44, kNf4Width, true, WeightLayout::kInOut));
    for (const auto& layer : layers) {
      layer->add_adapter({.rank = kNf4Rank, .scale = kNf4Scale, .lengths = lengths});
      for (at::Tensor& param : layer->parameters()) param.normal_(0.0, 0.2);
      at::Tensor blocks;
      const at::Tensor decoded = in_and_out_of_nf4(layer->weight, blocks);
      layer->weight.set_requires_grad(false);
      layer->weight.set_data(lends ? at::full_like(decoded, std::numeric_limits<float>::quiet_NaN())
                                   : decoded);
      if (lends) lend_nf4(layer->weight, blocks);
      if (layer->bias.defined()) layer->bias.set_requires_grad(false);
    }
  }

  at::Tensor operator()(const at::Tensor& x) const {
    const at::Tensor inner = linear_group(x, {layers[0].get(), layers[1].get(), layers[2].get()});
    return layers[3]->forward(at::tanh(inner));
  }

  std::vector<at::Tensor> trained() const {
    std::vector<at::Tensor> some;
    for (const auto& layer : layers)
      for (const at::Tensor& param : layer->parameters())
        if (param.requires_grad()) some.push_back(param);
    return some;
  }
};

/// The loss of a step, and the gradient of the input.
struct Nf4Step {
  double loss;
  at::Tensor input_gradient;
};

template <typename Network>
std::vector<Nf4Step> train_nf4(const Network& network, const std::vector<at::Tensor>& trained) {
  torch::optim::AdamW optimizer(trained, torch::optim::AdamWOptions(1e-2));
  at::manual_seed(11);
  std::vector<Nf4Step> steps;
  for (int64_t step = 0; step < 20; ++step) {
    at::Tensor x = at::randn({8, kNf4Width}).set_requires_grad(true);
    const at::Tensor target = at::sin(x.detach());
    optimizer.zero_grad();
    const at::Tensor loss = at::mse_loss(network(x), target);
    loss.backward();
    optimizer.step();
    steps.push_back({loss.item<double>(), x.grad()});
  }
  return steps;
}

TEST(Nf4Layers, TrainAdaptersAsLayersOfTheDecodedWeightsDo) {
  for (const bool lengths : {false, true}) {
    const Nf4Net lent(true, lengths), plain(false, lengths);
    const auto ours = train_nf4(lent, lent.trained()), theirs = train_nf4(plain, plain.trained());
    for (size_t step = 0; step < ours.size(); ++step) {
      EXPECT_EQ(ours[step].loss, theirs[step].loss) << step;
      EXPECT_TRUE(ours[step].input_gradient.equal(theirs[step].input_gradient)) << step;
    }
    const auto a = lent.trained(), b = plain.trained();
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(a[i].equal(b[i])) << i;
    EXPECT_LT(ours.back().loss, ours.front().loss);
  }
}

TEST(Nf4Layers, HaveTheLossesOfTheSameNetworkInOperators) {
  const Nf4Net net(true, false), start(false, false);
  std::vector<at::Tensor> w, a, b;
  for (const auto& layer : start.layers) {
    w.push_back(layer->weight.clone());
    a.push_back(layer->named_parameters()["lora_A.weight"].detach().clone().set_requires_grad(true));
    b.push_back(layer->named_parameters()["lora_B.weight"].detach().clone().set_requires_grad(true));
  }
  w[3] = w[3].t();
  const at::Tensor bias = start.layers[3]->bias.detach().clone();
  const auto layer = [&](const at::Tensor& x, size_t i) {
    return at::matmul(x, w[i].t()) + kNf4Scale * at::matmul(at::matmul(x, a[i].t()), b[i].t());
  };
  const auto network = [&](const at::Tensor& x) {
    return layer(at::tanh(at::cat({layer(x, 0), layer(x, 1), layer(x, 2)}, -1)), 3) + bias;
  };
  std::vector<at::Tensor> trained = a;
  trained.insert(trained.end(), b.begin(), b.end());
  const auto ours = train_nf4(net, net.trained()), theirs = train_nf4(network, trained);
  for (size_t step = 0; step < ours.size(); ++step)
    EXPECT_NEAR(ours[step].loss, theirs[step].loss, 1e-4 * theirs[step].loss) << step;
}

TEST(Nf4Layers, OtherOperatorsReadWhatWasLentDecoded) {
  const Nf4Net lent(true, false), plain(false, false);
  for (size_t i = 0; i < lent.layers.size(); ++i)
    EXPECT_TRUE(readable(lent.layers[i]->weight).equal(plain.layers[i]->weight)) << i;
  lend_nf4(lent.layers[0]->weight, {});
  EXPECT_TRUE(readable(lent.layers[0]->weight).isnan().all().item<bool>()) << "taken back";
}

}  // namespace
}  // namespace trireme::nn
