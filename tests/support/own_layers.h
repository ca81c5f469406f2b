#pragma once
// Our layers as functions of an input and of parameters, each beside what torch computes it with.
#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/batch_norm.h"
#include "trireme/nn/convolution.h"
#include "trireme/nn/functional.h"
#include "trireme/nn/group_norm.h"
#include "trireme/nn/loss.h"
#include "trireme/nn/recomputed.h"

namespace trireme::test {

using Tensors = std::vector<at::Tensor>;

struct OwnLayer {
  using Compute = std::function<at::Tensor(const at::Tensor& x, const Tensors& params)>;

  std::string name;
  std::vector<std::vector<int64_t>> shapes;  ///< of its parameters
  Compute ours, theirs;
};

inline constexpr int64_t kLayerRows = 6, kLayerWidth = 8;
inline constexpr double kLayerEps = 1e-5;

/// Integers of [0, kLayerWidth), a row.
inline at::Tensor labels_of(const at::Tensor& x) {
  return x.detach().argmax(-1);
}

/// (rows, width) -> (rows, width, 3, 3), channels-last; the positions differ.
inline at::Tensor image_of(const at::Tensor& x) {
  const at::Tensor factors = at::linspace(-1.0, 2.0, 9).view({1, 1, 3, 3});
  return (x.view({x.size(0), x.size(1), 1, 1}) * factors).contiguous(at::MemoryFormat::ChannelsLast);
}

inline at::Tensor rms_normed(const at::Tensor& x, const at::Tensor& weight) {
  return x * (x.square().mean(-1, /*keepdim=*/true) + kLayerEps).rsqrt() * weight;
}

inline std::vector<OwnLayer> own_layers() {
  using P = const Tensors&;
  using X = const at::Tensor&;
  constexpr int64_t w = kLayerWidth;
  const auto layer_normed = [](X x, X weight, X bias) {
    return at::layer_norm(x, {kLayerWidth}, weight, bias, kLayerEps);
  };
  const auto batch_call = [](bool relu) { return kernels::BatchNormCall{.eps = kLayerEps, .relu = relu}; };
  return {
      {"linear",
       {{w, w}, {w}},
       [](X x, P p) { return nn::linear(x, p[0], p[1]); },
       [](X x, P p) { return at::linear(x, p[0], p[1]); }},
      {"linear without a bias",
       {{4, w}},
       [](X x, P p) { return nn::linear(x, p[0], {}); },
       [](X x, P p) { return at::linear(x, p[0]); }},
      {"linear (in, out)",
       {{w, 4}, {4}},
       [](X x, P p) { return nn::linear(x, p[0], p[1], nn::WeightLayout::kInOut); },
       [](X x, P p) { return at::addmm(p[1], x, p[0]); }},
      {"linear of a parameter",
       {{5, w}, {w, w}},
       [](X x, P p) { return nn::linear(p[0], p[1], {}) * x.mean(); },
       [](X x, P p) { return at::linear(p[0], p[1]) * x.mean(); }},
      {"linear group",
       {{4, w}, {2, w}, {2, w}},
       [](X x, P p) { return nn::linear_group(x, p); },
       [](X x, P p) {
         return at::cat({at::linear(x, p[0]), at::linear(x, p[1]), at::linear(x, p[2])}, -1);
       }},
      {"logits",
       {{5, w}},
       [](X x, P p) { return nn::logits(x, p[0]); },
       [](X x, P p) { return at::linear(x, p[0]); }},
      {"embedding",
       {{w, 4}},
       [](X x, P p) { return nn::embedding(labels_of(x), p[0]) * x.mean(); },
       [](X x, P p) { return at::embedding(p[0], labels_of(x)) * x.mean(); }},
      {"RMSNorm",
       {{w}},
       [](X x, P p) { return nn::rms_norm(x, p[0], kLayerEps); },
       [](X x, P p) { return rms_normed(x, p[0]); }},
      {"LayerNorm",
       {{w}, {w}},
       [](X x, P p) { return nn::layer_norm(x, p[0], p[1], kLayerEps); },
       [=](X x, P p) { return layer_normed(x, p[0], p[1]); }},
      {"LayerNorm of a parameter",
       {{4, w}, {w}, {w}},
       [](X x, P p) { return nn::layer_norm(p[0], p[1], p[2], kLayerEps) * x.mean(); },
       [=](X x, P p) { return layer_normed(p[0], p[1], p[2]) * x.mean(); }},
      {"RMSNorm of a sum",
       {{w}},
       [](X x, P p) {
         const auto [sum, y] = nn::add_rms_norm(x, x * x, p[0], kLayerEps);
         return sum + y;
       },
       [](X x, P p) { return x + x * x + rms_normed(x + x * x, p[0]); }},
      {"LayerNorm and linear",
       {{w}, {w}, {4, w}, {4}},
       [](X x, P p) {
         const auto [sum, y] = nn::add_norm_linear(x, x * x, {p[0], p[1], kLayerEps}, p[2], p[3]);
         return at::cat({sum, y}, -1);
       },
       [=](X x, P p) {
         const at::Tensor sum = x + x * x;
         return at::cat({sum, at::linear(layer_normed(sum, p[0], p[1]), p[2], p[3])}, -1);
       }},
      {"GELU and linear",
       {{4, w}, {4}},
       [](X x, P p) { return nn::activated_linear(x, nn::Activation::kGelu, p[0], p[1]); },
       [](X x, P p) { return at::linear(at::gelu(x, "tanh"), p[0], p[1]); }},
      {"SwiGLU and linear",
       {{4, w / 2}},
       [](X x, P p) { return nn::activated_linear(x, nn::Activation::kSwiglu, p[0], {}); },
       [](X x, P p) {
         const Tensors halves = x.chunk(2, -1);
         return at::linear(at::silu(halves[0]) * halves[1], p[0]);
       }},
      {"GELU of a parameter",
       {{w}},
       [](X x, P p) { return x * nn::gelu(p[0]); },
       [](X x, P p) { return x * at::gelu(p[0], "tanh"); }},
      {"cross-entropy of a head",
       {{w, w}},
       [](X x, P p) { return nn::linear_cross_entropy(x, p[0], labels_of(x), /*chunk_bytes=*/1); },
       [](X x, P p) { return at::cross_entropy_loss(at::linear(x, p[0]), labels_of(x)); }},
      {"cross-entropy of logits",
       {{w, w}},
       [](X x, P p) { return nn::cross_entropy(nn::logits(x, p[0]), labels_of(x)); },
       [](X x, P p) { return at::cross_entropy_loss(at::linear(x, p[0]), labels_of(x)); }},
      {"convolution",
       {{4, w, 3, 3}},
       [](X x, P p) { return nn::conv2d(image_of(x), p[0], /*stride=*/1, /*padding=*/1); },
       [](X x, P p) { return at::conv2d(image_of(x), p[0], {}, 1, 1); }},
      {"convolution of points",
       {{4, w, 1, 1}},
       [](X x, P p) { return nn::conv2d(image_of(x), p[0], /*stride=*/1, /*padding=*/0); },
       [](X x, P p) { return at::conv2d(image_of(x), p[0]); }},
      {"BatchNorm and ReLU",
       {{w}, {w}},
       [=](X x, P p) { return nn::batch_norm(image_of(x), p[0], p[1], batch_call(true)); },
       [](X x, P p) {
         return at::batch_norm(image_of(x), p[0], p[1], {}, {}, true, 0.1, kLayerEps, false).relu();
       }},
      {"BatchNorm",
       {{w}, {w}},
       [=](X x, P p) { return nn::batch_norm(image_of(x), p[0], p[1], batch_call(false)); },
       [](X x, P p) { return at::batch_norm(image_of(x), p[0], p[1], {}, {}, true, 0.1, kLayerEps, false); }},
      {"GroupNorm",
       {{w}, {w}},
       [](X x, P p) {
         return nn::group_norm(image_of(x), p[0], p[1], {.groups = 2, .eps = kLayerEps, .relu = true});
       },
       [](X x, P p) { return at::group_norm(image_of(x).contiguous(), 2, p[0], p[1], kLayerEps).relu(); }},
  };
}

}  // namespace trireme::test
