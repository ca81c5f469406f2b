// GPT-2 (Radford et al. 2019), by the names and shapes of Hugging Face's GPT2LMHeadModel.
#include "trireme/base/error.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/family_parts.h"

namespace trireme::plan::gpt2 {
namespace {

std::vector<ParamSpec> embeddings(const ModelConfig& model) {
  return {matrix(model, "transformer.wte.weight", {model.vocab_size, model.d_model}),
          matrix(model, "transformer.wpe.weight", {model.max_seq_len, model.d_model})};
}

/// Linear weights are (in, out): Hugging Face keeps GPT-2's Conv1D layout.
UnitSpec block(const ModelConfig& model, int64_t layer) {
  const int64_t d = model.d_model, f = model.d_ff, q = query_width(model);
  const std::string name = fmt::format("transformer.h.{}", layer);
  UnitSpec unit{
      name,
      {ones(name + ".ln_1.weight", d), zeros(name + ".ln_1.bias", d),
       matrix(model, name + ".attn.c_attn.weight", {d, 3 * q}, BlockLayer::kQkv),
       zeros(name + ".attn.c_attn.bias", 3 * q),
       residual_matrix(model, name + ".attn.c_proj.weight", {q, d}, BlockLayer::kAttentionOutput),
       zeros(name + ".attn.c_proj.bias", d), ones(name + ".ln_2.weight", d), zeros(name + ".ln_2.bias", d),
       matrix(model, name + ".mlp.c_fc.weight", {d, f}, BlockLayer::kFeedForwardIn),
       zeros(name + ".mlp.c_fc.bias", f),
       residual_matrix(model, name + ".mlp.c_proj.weight", {f, d}, BlockLayer::kFeedForwardOut),
       zeros(name + ".mlp.c_proj.bias", d)}};
  for (ParamSpec& param : unit.params)
    if (param.name.starts_with(name + ".attn.c_attn.")) param.packed = 3;
  return unit;
}

std::vector<ParamSpec> final_norm(const ModelConfig& model) {
  return {ones("transformer.ln_f.weight", model.d_model), zeros("transformer.ln_f.bias", model.d_model)};
}

/// Inputs and outputs of both norms, q k v, attention's output, the feed-forward before and after GELU; with
/// dropout two masks of d bytes.
int64_t saved_bytes(const ModelConfig& model, int64_t element_bytes) {
  const int64_t masks = model.dropout > 0.0 ? 2 * model.d_model : 0;
  return element_bytes * (4 * model.d_model + 4 * query_width(model) + 2 * model.d_ff) + 4 * model.n_heads +
         masks;
}

/// q k v and attention's output; the feed-forward. All have a bias.
BlockLinears linears(const ModelConfig& model) {
  const int64_t d = model.d_model, f = model.d_ff, q = query_width(model);
  return {.attention = {.taken = d + q, .made = 3 * q + d, .biased = 3 * q + d},
          .rest = {.taken = d + f, .made = f + d, .biased = f + d}};
}

/// The outputs of both norms and of GELU.
int64_t cheap_bytes(const ModelConfig& model, int64_t element_bytes) {
  return element_bytes * (2 * model.d_model + model.d_ff);
}

void check(const Config& config, const Origins& origins) {
  const ModelConfig& model = config.model;
  if (model.n_kv_heads != model.n_heads) {
    throw ConfigError(
        "[plan.config] {} differs from {}, but gpt2 has one key and value head per query head; set "
        "model.n_kv_heads to 0",
        said(origins, "model.n_kv_heads", model.n_kv_heads), said(origins, "model.n_heads", model.n_heads));
  }
  if (query_width(model) != model.d_model) {
    throw ConfigError(
        "[plan.config] {} x {} = {} differs from {}, but the heads of gpt2 split its width; set "
        "model.head_dim "
        "to 0, or use model.family=llama",
        said(origins, "model.n_heads", model.n_heads), said(origins, "model.head_dim", model.head_dim),
        query_width(model), said(origins, "model.d_model", model.d_model));
  }
  if (model.max_seq_len < config.data.seq_len) {
    throw ConfigError(
        "[plan.config] {} has too few positions for {}; set model.max_seq_len to 0 or to at least {}",
        said(origins, "model.max_seq_len", model.max_seq_len),
        said(origins, "data.seq_len", config.data.seq_len), config.data.seq_len);
  }
}

}  // namespace
}  // namespace trireme::plan::gpt2

namespace trireme::plan {
const ModelFamilyRecord kGpt2Record = {.family = ModelFamily::kGpt2,
                                       .attends = true,
                                       .drops = true,
                                       .in_out = true,
                                       .embeddings = gpt2::embeddings,
                                       .block = gpt2::block,
                                       .attention_params = 6,
                                       .final_norm = gpt2::final_norm,
                                       .linears = gpt2::linears,
                                       .saved_bytes = gpt2::saved_bytes,
                                       .cheap_bytes = gpt2::cheap_bytes,
                                       .check = gpt2::check};

}  // namespace trireme::plan
