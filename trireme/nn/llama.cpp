#include "trireme/nn/llama.h"

#include "trireme/nn/adapter.h"
#include "trireme/nn/swiglu_feed_forward.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {

LlamaBlock::LlamaBlock(const plan::ModelConfig& config)
    : shape_{config.n_heads, config.n_kv_heads, plan::head_dim(config), config.attention} {
  const int64_t width = config.d_model;
  const int64_t query_width = shape_.heads * shape_.head_dim, kv_width = shape_.kv_heads * shape_.head_dim;
  const auto plain = [](int64_t in, int64_t out) { return std::make_shared<Linear>(in, out, false); };
  input_norm_ = register_module("input_layernorm", std::make_shared<RmsNorm>(width, config.norm_eps));
  const auto attention = register_module("self_attn", std::make_shared<Namespace>());
  query_ = attention->register_module("q_proj", plain(width, query_width));
  key_ = attention->register_module("k_proj", plain(width, kv_width));
  value_ = attention->register_module("v_proj", plain(width, kv_width));
  output_ = attention->register_module("o_proj", plain(query_width, width));
  mlp_norm_ = register_module("post_attention_layernorm", std::make_shared<RmsNorm>(width, config.norm_eps));
  const auto mlp = register_module("mlp", std::make_shared<Namespace>());
  gate_ = mlp->register_module("gate_proj", plain(width, config.d_ff));
  up_ = mlp->register_module("up_proj", plain(width, config.d_ff));
  down_ = mlp->register_module("down_proj", plain(config.d_ff, width));
  add_adapters(config.adapter, {{"q_proj", query_},
                                {"k_proj", key_},
                                {"v_proj", value_},
                                {"o_proj", output_},
                                {"gate_proj", gate_},
                                {"up_proj", up_},
                                {"down_proj", down_}});
}

at::Tensor LlamaBlock::forward(const at::Tensor& x, const RopeTable& rope, const BlockOptions& options) {
  const auto [residual, attended] = attend(x, rope, options);
  return feed_forward(residual, attended, options);
}

at::Tensor LlamaBlock::attention(const at::Tensor& x, const RopeTable& rope, const BlockOptions& options) {
  const auto [residual, attended] = attend(x, rope, options);
  return residual + attended;
}

std::pair<at::Tensor, at::Tensor> LlamaBlock::attend(const at::Tensor& x, const RopeTable& rope,
                                                     const BlockOptions& options) {
  const auto fp8 = options.fp8_of(BlockLayer::kQkv), out_fp8 = options.fp8_of(BlockLayer::kAttentionOutput);
  const auto out = [&](const at::Tensor& qkv) {
    return output_->forward(
        attention_in_context(qkv, shape_, rope, 0.0, options.attention, options.context, options.documents),
        {}, out_fp8, Output::kRead, {.before = {}, .after = options.joint});
  };
  if (options.recompute_cheap) {
    const auto [residual, qkv] = add_norm_linear(
        x, {}, input_norm_->norm(), {query_.get(), key_.get(), value_.get()}, fp8, options.joint);
    return {residual, out(qkv)};
  }
  const auto [residual, normed] = input_norm_->add_forward(x, {}, fp8);
  return {residual, out(linear_group(normed, {query_.get(), key_.get(), value_.get()}, fp8, options.joint))};
}

at::Tensor LlamaBlock::feed_forward(const at::Tensor& x, const at::Tensor& attended,
                                    const BlockOptions& options) {
  const auto in = options.fp8_of(BlockLayer::kFeedForwardIn),
             out = options.fp8_of(BlockLayer::kFeedForwardOut);
  if (options.recompute_cheap) {
    const auto [h, gate_up] =
        add_norm_linear(x, attended, mlp_norm_->norm(), {gate_.get(), up_.get()}, in, options.joint);
    return activated_linear(gate_up, Activation::kSwiglu, *down_, h, out, options.joint);
  }
  const auto [h, normed] = mlp_norm_->add_forward(x, attended, in);
  const bool is_adapted = gate_->has_adapter() || up_->has_adapter() || down_->has_adapter();
  if (casts_swiglu(in) && !is_adapted)
    return swiglu_feed_forward(normed, {gate_->weight, up_->weight}, down_->weight, h, *in, *out,
                               options.output, options.joint);
  const at::Tensor gate_up = linear_group(normed, {gate_.get(), up_.get()}, in, options.joint);
  return down_->forward(swiglu(gate_up, out), h, out, options.output, {.before = {}, .after = options.joint});
}

namespace {

RopeStretch stretch_of(const plan::ModelConfig& config) {
  if (config.rope_scaling == plan::RopeScaling::kNone) return {};
  return {.factor = config.rope_factor,
          .low_freq = config.rope_low_freq_factor,
          .high_freq = config.rope_high_freq_factor,
          .original_len = config.rope_original_len};
}

}  // namespace

Llama::Llama(const plan::ModelConfig& config)
    : head_dim_(plan::head_dim(config)),
      theta_(config.rope_theta),
      stretch_(stretch_of(config)),
      draws_(plan::draws_in_training(config)) {
  const auto body = register_module("model", std::make_shared<Namespace>());
  tokens_ =
      body->register_module("embed_tokens", std::make_shared<Embedding>(config.vocab_size, config.d_model));
  const auto list = body->register_module("layers", std::make_shared<Namespace>());
  for (int64_t i = 0; i < config.n_layers; ++i) {
    blocks_.push_back(list->register_module(std::to_string(i), std::make_shared<LlamaBlock>(config)));
  }
  norm_ = body->register_module("norm", std::make_shared<RmsNorm>(config.d_model, config.norm_eps));
  if (!config.tie_embeddings) {
    head_ = register_module("lm_head", std::make_shared<Linear>(config.d_model, config.vocab_size, false));
  }
}

const RopeTable& Llama::rope(int64_t length, at::Device device) {
  const at::Tensor& table = rope_.cosine;
  if (!table.defined() || table.size(0) != length || table.device() != device) {
    rope_ = make_rope_table(length, head_dim_, theta_, device, stretch_);
  }
  return rope_;
}

std::vector<Unit> Llama::body(const Documents& documents) {
  RopeTable by_token;  // the same for all blocks
  if (documents.are_apart())
    by_token = rope_in(documents, rope(documents.starts.size(1), documents.starts.device()));
  std::vector<Unit> units{
      {plan::kRootUnit, [this](const at::Tensor& tokens) { return tokens_->forward(tokens, joint()); }}};
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const auto rope_of = [this, by_token](const at::Tensor& x) -> const RopeTable& {
      return by_token.cosine.defined() ? by_token : rope(length_of(x), x.device());
    };
    const auto run = [this, i, documents, rope_of](const at::Tensor& x, Output output, KeptAttention* kept) {
      return blocks_[i]->forward(x, rope_of(x), block_options(i, documents, output, kept));
    };
    units.push_back(
        {.name = "model.layers." + std::to_string(i),
         .forward = [run](const at::Tensor& x) { return run(x, Output::kRead, nullptr); },
         .draws = draws_,
         .attention =
             [this, i, documents, rope_of](const at::Tensor& x) {
               return blocks_[i]->attention(x, rope_of(x), block_options(i, documents));
             },
         .mlp = [this, i](const at::Tensor& x) { return blocks_[i]->mlp(x, block_options(i, {})); },
         .again = [run](const at::Tensor& x) { return run(x, Output::kUnread, nullptr); },
         .keeping = [run](const at::Tensor& x, Output output,
                          KeptAttention& kept) { return run(x, output, &kept); }});
  }
  return units;
}

LanguageModel::Head Llama::head() {
  return {.norm = [this](const at::Tensor& x) { return norm_->forward(x); },
          .weight = head_ ? head_->weight : tokens_->weight,
          .tied = head_ == nullptr};
}

}  // namespace trireme::nn
