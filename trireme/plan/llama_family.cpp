// Llama (Touvron et al. 2023; Llama 3, 2024), by the names and shapes of Hugging Face's LlamaForCausalLM.
#include "trireme/base/error.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/family_parts.h"

namespace trireme::plan::llama {
namespace {

std::vector<ParamSpec> embeddings(const ModelConfig& model) {
  return {matrix(model, "model.embed_tokens.weight", {model.vocab_size, model.d_model})};
}

/// q, k, v are neighbours, and so are gate and up: each group is one matrix in the flat buffer.
UnitSpec block(const ModelConfig& model, int64_t layer) {
  const int64_t d = model.d_model, f = model.d_ff, q = query_width(model), kv = kv_width(model);
  const std::string name = fmt::format("model.layers.{}", layer);
  return {name,
          {ones(name + ".input_layernorm.weight", d),
           matrix(model, name + ".self_attn.q_proj.weight", {q, d}, BlockLayer::kQkv),
           matrix(model, name + ".self_attn.k_proj.weight", {kv, d}, BlockLayer::kQkv),
           matrix(model, name + ".self_attn.v_proj.weight", {kv, d}, BlockLayer::kQkv),
           residual_matrix(model, name + ".self_attn.o_proj.weight", {d, q}, BlockLayer::kAttentionOutput),
           ones(name + ".post_attention_layernorm.weight", d),
           matrix(model, name + ".mlp.gate_proj.weight", {f, d}, BlockLayer::kFeedForwardIn),
           matrix(model, name + ".mlp.up_proj.weight", {f, d}, BlockLayer::kFeedForwardIn),
           residual_matrix(model, name + ".mlp.down_proj.weight", {d, f}, BlockLayer::kFeedForwardOut)}};
}

std::vector<ParamSpec> final_norm(const ModelConfig& model) {
  return {ones("model.norm.weight", model.d_model)};
}

/// Inputs and outputs of both norms, q k v, attention's output, gate, up and their product.
int64_t saved_bytes(const ModelConfig& model, int64_t element_bytes) {
  return element_bytes * (4 * model.d_model + 2 * query_width(model) + 2 * kv_width(model) + 3 * model.d_ff) +
         4 * model.n_heads;
}

/// q, k, v and attention's output; gate and up, and what follows their product.
BlockLinears linears(const ModelConfig& model) {
  const int64_t d = model.d_model, f = model.d_ff, q = query_width(model);
  return {.attention = {.taken = d + q, .made = d + q + 2 * kv_width(model)},
          .rest = {.taken = d + f, .made = 2 * f + d}};
}

/// The outputs of both norms and the product.
int64_t cheap_bytes(const ModelConfig& model, int64_t element_bytes) {
  return element_bytes * (2 * model.d_model + model.d_ff);
}

/// Between the two wavelengths the change grows from nothing to all of it.
void check_scaling(const ModelConfig& model, const Origins& origins) {
  if (model.rope_scaling == RopeScaling::kNone || model.rope_low_freq_factor < model.rope_high_freq_factor)
    return;
  throw ConfigError("[plan.config] {} must be below {}; the published models have 1 and 4",
                    said(origins, "model.rope_low_freq_factor", model.rope_low_freq_factor),
                    said(origins, "model.rope_high_freq_factor", model.rope_high_freq_factor));
}

void check(const Config& config, const Origins& origins) {
  const ModelConfig& model = config.model;
  check_scaling(model, origins);
  if (head_dim(model) % 2 == 0) return;
  const std::string size = model.head_dim > 0
                               ? said(origins, "model.head_dim", model.head_dim)
                               : fmt::format("{} / {} = {}", said(origins, "model.d_model", model.d_model),
                                             said(origins, "model.n_heads", model.n_heads), head_dim(model));
  throw ConfigError("[plan.config] {} is odd, but rotary embeddings rotate pairs; make the head size even",
                    size);
}

}  // namespace
}  // namespace trireme::plan::llama

namespace trireme::plan {
const ModelFamilyRecord kLlamaRecord = {.family = ModelFamily::kLlama,
                                        .attends = true,
                                        .drops = false,
                                        .rotates = true,
                                        .embeddings = llama::embeddings,
                                        .block = llama::block,
                                        .attention_params = 5,
                                        .final_norm = llama::final_norm,
                                        .linears = llama::linears,
                                        .saved_bytes = llama::saved_bytes,
                                        .cheap_bytes = llama::cheap_bytes,
                                        .check = llama::check};

}  // namespace trireme::plan
