// The mini-GPT of GT's demo: pre-norm blocks, learned positions, causal attention. Each scope names the
// signal that says where its tensors lie; the model is the same for every file of signals.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/gt/nn.h"
#include "trireme/gt/recompute.h"
#include "trireme/gt/signal.h"
#include "trireme/gt/tensor.h"

namespace mini_gpt {

struct Config {
  int64_t layers = 8, width = 1024, heads = 16, hidden = 4096, vocabulary = 50257, tokens = 128, stages = 4;
  bool recompute = false;  ///< blocks are computed again in backward
  int64_t stage_of(int64_t layer) const { return layer * stages / layers; }
};

inline std::string stage_name(int64_t stage) {
  return "pp_stage" + std::to_string(stage);
}

struct Block {
  gt::nn::LayerNorm attention_norm, feed_norm;
  gt::nn::Linear qkv, out, up, down;

  explicit Block(const Config& config)
      : attention_norm(config.width),
        feed_norm(config.width),
        qkv(config.width, 3 * config.width),
        out(config.width, config.width, true, 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers))),
        up(config.width, config.hidden),
        down(config.hidden, config.width, true, 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers))) {}

  gt::Tensor operator()(gt::Tensor x, const Config& config, const std::string& stage) const {
    x = x + attention(normed(attention_norm, x, stage), config, stage);
    return x + feed_forward(normed(feed_norm, x, stage), stage);
  }

  gt::nn::NamedTensors parameters(const std::string& name) const {
    gt::nn::NamedTensors all;
    for (const auto& more : {attention_norm.parameters(name + ".ln_1"), qkv.parameters(name + ".attn.c_attn"),
                             out.parameters(name + ".attn.c_proj"), feed_norm.parameters(name + ".ln_2"),
                             up.parameters(name + ".mlp.c_fc"), down.parameters(name + ".mlp.c_proj")})
      all.insert(all.end(), more.begin(), more.end());
    return all;
  }

 private:
  static gt::Tensor normed(const gt::nn::LayerNorm& norm, const gt::Tensor& x, const std::string& stage) {
    const gt::signal::context scope(stage);
    return norm(x);
  }

  /// Columns of QKV belong to heads, one head's queries, keys and values side by side: a worker has whole
  /// heads.
  gt::Tensor attention(const gt::Tensor& x, const Config& config, const std::string& stage) const {
    const int64_t batch = x.size(0), tokens = x.size(1), width = config.width / config.heads;
    gt::Tensor mixed;
    {
      const gt::signal::context scope(stage + "_colpar");
      const auto parts =
          qkv(x).reshape({batch, tokens, config.heads, 3 * width}).split({width, width, width}, 3);
      mixed = gt::nn::functional::attention(parts[0].transpose(1, 2), parts[1].transpose(1, 2),
                                            parts[2].transpose(1, 2), true,
                                            1.0 / std::sqrt(static_cast<double>(width)))
                  .transpose(1, 2)
                  .reshape({batch, tokens, config.width});
    }
    const gt::signal::context scope(stage + "_rowpar");
    return out(mixed);
  }

  gt::Tensor feed_forward(const gt::Tensor& x, const std::string& stage) const {
    gt::Tensor hidden;
    {
      const gt::signal::context scope(stage + "_colpar");
      hidden = gt::gelu(up(x));
    }
    const gt::signal::context scope(stage + "_rowpar");
    return down(hidden);
  }
};

class MiniGpt {
 public:
  explicit MiniGpt(const Config& config)
      : config_(config),
        words_(config.vocabulary, config.width),
        positions_(config.tokens, config.width),
        norm_(config.width),
        head_(config.width, config.vocabulary, false) {
    for (int64_t layer = 0; layer < config.layers; ++layer) blocks_.emplace_back(config);
  }

  /// The mean loss of (B, T) words and the words behind them, int64 both. Words are needed by the first
  /// stage, and those behind them by the last one.
  gt::Tensor loss(const gt::Tensor& words, const gt::Tensor& next) const {
    const int64_t tokens = words.size(1);
    gt::Tensor x;
    {
      const gt::signal::context scope(stage_name(0));
      x = words_(words) + positions_(gt::arange(tokens));
    }
    for (int64_t layer = 0; layer < config_.layers; ++layer) {
      const int64_t stage = config_.stage_of(layer), before = layer == 0 ? 0 : config_.stage_of(layer - 1);
      if (stage != before) {
        const gt::signal::context boundary("stage" + std::to_string(before) + "_to_stage" +
                                           std::to_string(stage));
        x = gt::here(x);  // the document's x = x
      }
      const auto block = [&] { return blocks_[static_cast<size_t>(layer)](x, config_, stage_name(stage)); };
      x = config_.recompute ? gt::recompute(block) : block();
    }
    return loss_of(x, next);
  }

  /// The same of values of this process.
  gt::Tensor loss(const std::vector<int64_t>& words, const std::vector<int64_t>& next, int64_t batch) const {
    const auto tokens = static_cast<int64_t>(words.size()) / batch;
    return loss(gt::tensor(words, {batch, tokens}), gt::tensor(next, {batch, tokens}));
  }

  gt::nn::NamedTensors parameters() const {
    gt::nn::NamedTensors all = words_.parameters("wte");
    for (const auto& one : positions_.parameters("wpe")) all.push_back(one);
    for (size_t layer = 0; layer < blocks_.size(); ++layer) {
      for (const auto& one : blocks_[layer].parameters("h." + std::to_string(layer))) all.push_back(one);
    }
    for (const auto& one : norm_.parameters("ln_f")) all.push_back(one);
    for (const auto& one : head_.parameters("lm_head")) all.push_back(one);
    return all;
  }

 private:
  gt::Tensor loss_of(gt::Tensor x, const gt::Tensor& next) const {
    const std::string last = stage_name(config_.stages - 1);
    const int64_t rows = next.size(0) * next.size(1);
    {
      const gt::signal::context scope(last);
      x = norm_(x);
    }
    gt::Tensor logits;
    {
      const gt::signal::context scope(last + "_colpar");
      logits = head_(x).reshape({rows, config_.vocabulary});
    }
    const gt::signal::context scope(last);
    return gt::nn::functional::cross_entropy(logits, next.reshape({rows}));
  }

  Config config_;
  gt::nn::Embedding words_, positions_;
  gt::nn::LayerNorm norm_;
  gt::nn::Linear head_;
  std::vector<Block> blocks_;
};

}  // namespace mini_gpt
