#pragma once
// A transformer as a user of torch writes it, and the same with layers that are cut over ranks. Both have the
// same names of parameters, in the same order.
#include <ATen/ATen.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/utils.h>

#include <memory>
#include <mutex>

#include "tests/parallel/plain_net.h"
#include "trireme/parallel/tensor_layers.h"

namespace trireme::test {

inline constexpr int64_t kWords = 37, kWidth = 16, kHeads = 4, kTokens = 8, kSequences = 4;

/// qkv (B, T, 3 heads hd), of any number of heads -> (B, T, heads hd). Queries are normed by head.
inline at::Tensor attend(const at::Tensor& qkv, torch::nn::LayerNorm& query_norm) {
  const auto heads = qkv.unflatten(-1, {3, -1, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
  const at::Tensor queries = query_norm(heads[0]);
  return at::scaled_dot_product_attention(queries, heads[1], heads[2], {}, 0.0, /*is_causal=*/true)
      .transpose(1, 2)
      .flatten(2);
}

inline torch::nn::LayerNorm layer_norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

/// `Column` and `Row` make a linear layer of these sizes.
template <typename Column, typename Row>
struct TransformerBlock : torch::nn::Module {
  template <typename MakeColumn, typename MakeRow>
  TransformerBlock(const MakeColumn& column, const MakeRow& row) {
    norm1 = register_module("norm1", layer_norm(kWidth));
    query_norm = register_module("query_norm", layer_norm(kWidth / kHeads));
    qkv = register_module("qkv", column(kWidth, 3 * kWidth, /*packed=*/3));
    out = register_module("out", row(kWidth, kWidth));
    norm2 = register_module("norm2", layer_norm(kWidth));
    up = register_module("up", column(kWidth, 2 * kWidth, /*packed=*/1));
    down = register_module("down", row(2 * kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    x = x + out->forward(attend(qkv->forward(norm1(x)), query_norm));
    return x + down->forward(at::gelu(up->forward(norm2(x))));
  }
  torch::nn::LayerNorm norm1{nullptr}, query_norm{nullptr}, norm2{nullptr};
  std::shared_ptr<Column> qkv, up;
  std::shared_ptr<Row> out, down;
};

struct PlainTransformer : torch::nn::Module {
  using Linear = torch::nn::LinearImpl;
  /// Where it is tied, the embedding is the head as well.
  explicit PlainTransformer(bool tied = false) {
    const auto linear = [](int64_t in, int64_t out, int64_t) { return std::make_shared<Linear>(in, out); };
    words = register_module("words", torch::nn::Embedding(kWords, kWidth));
    places = register_module("places", torch::nn::Embedding(kTokens, kWidth));
    for (int i = 0; i < 2; ++i)
      blocks->push_back(std::make_shared<TransformerBlock<Linear, Linear>>(
          linear, [&](int64_t in, int64_t out) { return linear(in, out, 1); }));
    register_module("blocks", blocks);
    norm = register_module("norm", layer_norm(kWidth));
    if (tied) return;
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWords).bias(false)));
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = words(tokens) + places(at::arange(tokens.size(1)));
    for (const auto& block : *blocks) x = block->as<TransformerBlock<Linear, Linear>>()->forward(x);
    const at::Tensor logits = at::linear(norm(x), head ? head->weight : words->weight);
    return at::cross_entropy_loss(logits.to(at::kFloat).flatten(0, 1), targets.flatten());
  }
  torch::nn::Embedding words{nullptr}, places{nullptr};
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};

struct CutTransformer : torch::nn::Module {
  using Block = TransformerBlock<parallel::ColumnLinear, parallel::RowLinear>;
  using Group = std::shared_ptr<comm::Group>;
  CutTransformer(const Group& group, parallel::Rows rows, bool tied = false)
      : splits(rows == parallel::Rows::kSplit), split(group), cross_entropy(kWords, group) {
    const auto column = [&](int64_t in, int64_t out, int64_t packed) {
      return std::make_shared<parallel::ColumnLinear>(
          in, out, group,
          parallel::ColumnOptions{.rows = rows, .heads = packed == 3 ? kHeads : 0, .packed = packed});
    };
    const auto row = [&](int64_t in, int64_t out) {
      return std::make_shared<parallel::RowLinear>(in, out, group, parallel::RowOptions{.rows = rows});
    };
    words =
        register_module("words", std::make_shared<parallel::VocabParallelEmbedding>(kWords, kWidth, group));
    places = register_module("places", torch::nn::Embedding(kTokens, kWidth));
    for (int i = 0; i < 2; ++i) blocks->push_back(std::make_shared<Block>(column, row));
    register_module("blocks", blocks);
    norm = register_module("norm", layer_norm(kWidth));
    if (tied) return;
    head = register_module("head", std::make_shared<parallel::ColumnLinear>(
                                       kWidth, kWords, group,
                                       parallel::ColumnOptions{.bias = false, .rows = rows, .uneven = true}));
  }
  at::Tensor loss(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = words->forward(tokens) + places(at::arange(tokens.size(1)));
    if (splits) x = split.forward(x);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    x = norm(x);
    if (head) return cross_entropy.forward(head->forward(x), targets);
    return cross_entropy.forward(at::linear(splits ? split.join(x) : x, words->weight), targets);
  }
  bool splits;
  std::shared_ptr<parallel::VocabParallelEmbedding> words;
  torch::nn::Embedding places{nullptr};
  parallel::SplitRows split;
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm norm{nullptr};
  std::shared_ptr<parallel::ColumnLinear> head;
  parallel::VocabParallelCrossEntropy cross_entropy;
};

/// Ranks are threads, and torch's generator is one for all of them, whatever each makes.
inline std::mutex generator_mutex;
template <typename Make>
auto seeded(const Make& make) {
  const std::lock_guard lock(generator_mutex);
  torch::manual_seed(5);
  return make();
}

/// (sequences, T) words that depend on the step.
inline at::Tensor drawn_words(int64_t step, uint64_t what) {
  const at::Tensor values = random(static_cast<uint64_t>(step) + what, {kSequences, kTokens});
  return ((values + 1.0) * (0.5 * static_cast<double>(kWords))).to(at::kLong).clamp_(0, kWords - 1);
}
inline at::Tensor words_at(int64_t step) {
  return drawn_words(step, 700);
}
/// Some are ignored, and not as many in each half of the batch.
inline at::Tensor wanted_at(int64_t step) {
  at::Tensor wanted = drawn_words(step, 900);
  wanted[0].narrow(0, 0, 3).fill_(-100);
  wanted[3].narrow(0, 5, 1).fill_(-100);
  return wanted;
}

}  // namespace trireme::test
