#include "trireme/nn/gpt2.h"

#include "trireme/base/error.h"
#include "trireme/nn/adapter.h"
#include "trireme/nn/attention.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_facts.h"

namespace trireme::nn {

Gpt2Block::Gpt2Block(const plan::ModelConfig& config)
    : shape_{config.n_heads, config.n_heads, plan::head_dim(config), config.attention},
      dropout_(config.dropout) {
  const int64_t width = config.d_model, query_width = shape_.heads * shape_.head_dim;
  const auto conv = [](int64_t in, int64_t out) {
    return std::make_shared<Linear>(in, out, true, WeightLayout::kInOut);
  };
  ln_1_ = register_module("ln_1", std::make_shared<LayerNorm>(width, config.norm_eps));
  const auto attention = register_module("attn", std::make_shared<Namespace>());
  attention_in_ = attention->register_module("c_attn", conv(width, 3 * query_width));
  attention_out_ = attention->register_module("c_proj", conv(query_width, width));
  ln_2_ = register_module("ln_2", std::make_shared<LayerNorm>(width, config.norm_eps));
  const auto mlp = register_module("mlp", std::make_shared<Namespace>());
  up_ = mlp->register_module("c_fc", conv(width, config.d_ff));
  down_ = mlp->register_module("c_proj", conv(config.d_ff, width));
  add_adapters(config.adapter,
               {{"c_attn", attention_in_}, {"c_proj", attention_out_}, {"c_fc", up_}, {"c_proj", down_}});
}

bool Gpt2Block::drops() const {
  return dropout_ > 0.0 && is_training();
}

at::Tensor Gpt2Block::dropped(const at::Tensor& x) const {
  return drops() ? at::dropout(x, dropout_, true) : x;
}

at::Tensor Gpt2Block::forward(const at::Tensor& x, const BlockOptions& options) {
  const auto [residual, attended] = attend(x, options);
  return feed_forward(residual, attended, options);
}

at::Tensor Gpt2Block::attention(const at::Tensor& x, const BlockOptions& options) {
  const auto [residual, attended] = attend(x, options);
  return residual + attended;
}

std::pair<at::Tensor, at::Tensor> Gpt2Block::attend(const at::Tensor& x, const BlockOptions& options) {
  const auto fp8 = options.fp8_of(BlockLayer::kQkv), out_fp8 = options.fp8_of(BlockLayer::kAttentionOutput);
  const auto out = [&](const at::Tensor& qkv) {
    const at::Tensor attended = attention_in_context(qkv, shape_, {}, drops() ? dropout_ : 0.0,
                                                     options.attention, options.context, options.documents);
    return dropped(attention_out_->forward(attended, {}, out_fp8, Output::kRead,
                                           {.before = {}, .after = options.joint}));
  };
  if (options.recompute_cheap) {
    const auto [residual, qkv] = add_norm_linear(x, {}, ln_1_->norm(), *attention_in_, fp8, options.joint);
    return {residual, out(qkv)};
  }
  const auto [residual, normed] = ln_1_->add_forward(x, {}, fp8);
  const Joints enters{.before = options.joint, .after = {}};
  return {residual, out(attention_in_->forward(normed, {}, fp8, Output::kRead, enters))};
}

at::Tensor Gpt2Block::feed_forward(const at::Tensor& x, const at::Tensor& attended,
                                   const BlockOptions& options) {
  const auto in = options.fp8_of(BlockLayer::kFeedForwardIn),
             out = options.fp8_of(BlockLayer::kFeedForwardOut);
  const Joints enters{.before = options.joint, .after = {}}, leaves{.before = {}, .after = options.joint};
  if (options.recompute_cheap) {
    const auto [h, inner] = add_norm_linear(x, attended, ln_2_->norm(), *up_, in, options.joint);
    const at::Tensor delta =
        activated_linear(inner, Activation::kGelu, *down_, drops() ? at::Tensor() : h, out, options.joint);
    return drops() ? h + dropped(delta) : delta;
  }
  const auto [h, normed] = ln_2_->add_forward(x, attended, in);
  const at::Tensor inner = nn::gelu(up_->forward(normed, {}, in, Output::kRead, enters), out);
  return drops() ? h + dropped(down_->forward(inner, {}, out, Output::kRead, leaves))
                 : down_->forward(inner, h, out, options.output, leaves);
}

Gpt2::Gpt2(const plan::ModelConfig& config)
    : dropout_(config.dropout), draws_(plan::draws_in_training(config)) {
  const int64_t width = config.d_model;
  const auto body = register_module("transformer", std::make_shared<Namespace>());
  tokens_ = body->register_module("wte", std::make_shared<Embedding>(config.vocab_size, width));
  positions_ = body->register_module("wpe", std::make_shared<Embedding>(config.max_seq_len, width));
  const auto list = body->register_module("h", std::make_shared<Namespace>());
  for (int64_t i = 0; i < config.n_layers; ++i) {
    blocks_.push_back(list->register_module(std::to_string(i), std::make_shared<Gpt2Block>(config)));
  }
  norm_ = body->register_module("ln_f", std::make_shared<LayerNorm>(width, config.norm_eps));
  if (!config.tie_embeddings) {
    head_ = register_module("lm_head", std::make_shared<Linear>(width, config.vocab_size, false));
  }
}

namespace {

/// The numbers of this rank's rows of tokens (B, T) within sequences of which these have the places `mine`.
at::Tensor places_of(const at::Tensor& tokens, const std::vector<plan::Range>& mine, const Joint& joint) {
  std::vector<at::Tensor> places;
  for (const plan::Range& range : mine)
    places.push_back(at::arange(range.begin, range.end, tokens.options()));
  return at::cat(places).take(nn::positions(tokens, joint));
}

/// The places in their documents of the rows of tokens (B, T) that this rank has.
at::Tensor places_of(const Documents& documents, const std::vector<plan::Range>& mine, const Joint* joint) {
  const at::Tensor places = rows_of(places_in(documents), mine, 1);
  if (joint == nullptr) return places;
  const int64_t rows = places.numel() / joint->size();
  return places.flatten().narrow(0, joint->rank() * rows, rows).view({places.size(0), -1});
}

}  // namespace

/// (B, T, D), or (T, D) of the same for all sequences.
at::Tensor Gpt2::embedded_places(const at::Tensor& tokens, const Documents& documents) {
  const std::vector<plan::Range> mine = positions(tokens.size(1));
  TRIREME_CHECK(
      mine.back().end <= positions_->weight.size(0),
      "[nn.gpt2] a sequence of {} tokens is longer than the model's {} positions; raise model.max_seq_len",
      mine.back().end, positions_->weight.size(0));
  if (documents.are_apart()) return positions_->forward(places_of(documents, mine, joint().get()));
  return joint() ? positions_->forward(places_of(tokens, mine, *joint()))
                 : rows_of(positions_->weight, mine, 0);
}

at::Tensor Gpt2::embedded(const at::Tensor& tokens, const Documents& documents) {
  const at::Tensor places = embedded_places(tokens, documents);
  const at::Tensor x = tokens_->forward(tokens, joint()) + places;
  return dropout_ > 0.0 && is_training() ? at::dropout(x, dropout_, true) : x;
}

std::vector<Unit> Gpt2::body(const Documents& documents) {
  std::vector<Unit> units{
      {plan::kRootUnit, [this, documents](const at::Tensor& tokens) { return embedded(tokens, documents); },
       dropout_ > 0.0}};
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const auto run = [this, i, documents](const at::Tensor& x, Output output, KeptAttention* kept) {
      return blocks_[i]->forward(x, block_options(i, documents, output, kept));
    };
    units.push_back(
        {.name = "transformer.h." + std::to_string(i),
         .forward = [run](const at::Tensor& x) { return run(x, Output::kRead, nullptr); },
         .draws = draws_,
         .attention =
             [this, i, documents](const at::Tensor& x) {
               return blocks_[i]->attention(x, block_options(i, documents));
             },
         .mlp = [this, i](const at::Tensor& x) { return blocks_[i]->mlp(x, block_options(i, {})); },
         .again = [run](const at::Tensor& x) { return run(x, Output::kUnread, nullptr); },
         .keeping = [run](const at::Tensor& x, Output output,
                          KeptAttention& kept) { return run(x, output, &kept); }});
  }
  return units;
}

LanguageModel::Head Gpt2::head() {
  return {.norm = [this](const at::Tensor& x) { return norm_->forward(x); },
          .weight = head_ ? head_->weight : tokens_->weight,
          .tied = head_ == nullptr};
}

}  // namespace trireme::nn
