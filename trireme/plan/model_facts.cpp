#include "trireme/plan/model_facts.h"

#include <functional>
#include <numeric>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

/// Sizes in the letters of the papers: V tokens, D width, F feed-forward width, K width of keys and of
/// values.
struct Sizes {
  explicit Sizes(const ModelConfig& model)
      : layers(model.n_layers),
        vocab(model.vocab_size),
        positions(model.max_seq_len),
        d(model.d_model),
        f(model.d_ff),
        kv(model.n_heads > 0 ? model.d_model / model.n_heads * model.n_kv_heads : 0) {}
  int64_t layers, vocab, positions, d, f, kv;
};

using Params = std::vector<ParamSpec>;

void add_weight_and_bias(Params& params, const std::string& name, std::vector<int64_t> shape) {
  params.push_back({name + ".weight", shape});
  params.push_back({name + ".bias", {shape.back()}});
}

UnitSpec gpt2_root(const Sizes& s) {
  return {"root",
          {{"transformer.wte.weight", {s.vocab, s.d}}, {"transformer.wpe.weight", {s.positions, s.d}}}};
}

Params gpt2_norm(const Sizes& s) {
  Params params;
  add_weight_and_bias(params, "transformer.ln_f", {s.d});
  return params;
}

/// Linear weights as (in, out): Hugging Face keeps GPT-2's Conv1D layout.
UnitSpec gpt2_block(const Sizes& s, int64_t layer) {
  UnitSpec unit{fmt::format("transformer.h.{}", layer), {}};
  const std::string prefix = unit.name + ".";
  add_weight_and_bias(unit.params, prefix + "ln_1", {s.d});
  add_weight_and_bias(unit.params, prefix + "attn.c_attn", {s.d, 3 * s.d});
  add_weight_and_bias(unit.params, prefix + "attn.c_proj", {s.d, s.d});
  add_weight_and_bias(unit.params, prefix + "ln_2", {s.d});
  add_weight_and_bias(unit.params, prefix + "mlp.c_fc", {s.d, s.f});
  add_weight_and_bias(unit.params, prefix + "mlp.c_proj", {s.f, s.d});
  return unit;
}

UnitSpec llama_root(const Sizes& s) {
  return {"root", {{"model.embed_tokens.weight", {s.vocab, s.d}}}};
}

Params llama_norm(const Sizes& s) {
  return {{"model.norm.weight", {s.d}}};
}

/// q, k, v are neighbours, and so are gate and up: each family is one matrix in the flat buffer.
UnitSpec llama_block(const Sizes& s, int64_t layer) {
  const std::string name = fmt::format("model.layers.{}", layer);
  return {name,
          {{name + ".input_layernorm.weight", {s.d}},
           {name + ".self_attn.q_proj.weight", {s.d, s.d}},
           {name + ".self_attn.k_proj.weight", {s.kv, s.d}},
           {name + ".self_attn.v_proj.weight", {s.kv, s.d}},
           {name + ".self_attn.o_proj.weight", {s.d, s.d}},
           {name + ".post_attention_layernorm.weight", {s.d}},
           {name + ".mlp.gate_proj.weight", {s.f, s.d}},
           {name + ".mlp.up_proj.weight", {s.f, s.d}},
           {name + ".mlp.down_proj.weight", {s.d, s.f}}}};
}

UnitSpec mlp_root(const Sizes& s) {
  return {"root", {{"embed.weight", {s.vocab, s.d}}}};
}

Params mlp_norm(const Sizes& s) {
  return {{"norm.weight", {s.d}}};
}

UnitSpec mlp_block(const Sizes& s, int64_t layer) {
  const std::string name = fmt::format("blocks.{}", layer);
  return {name,
          {{name + ".norm.weight", {s.d}},
           {name + ".up.weight", {s.f, s.d}},
           {name + ".down.weight", {s.d, s.f}}}};
}

/// Bytes of one layer that one token keeps for backward, with `e` bytes an element and fused attention (its
/// output and an fp32 log-sum-exp a head).
///   gpt2   e (8d + 2f) + 4 heads: inputs and outputs of both norms, q k v, attention's output, the
///   feed-forward
///          before and after GELU; with dropout two masks of d bytes
///   llama  e (6d + 2kv + 3f) + 4 heads: the same with gate, up and their product
///   mlp    e (2d + 2f): input and output of the norm; the feed-forward before and after SiLU
/// Recomputing what is cheap leaves out the outputs of norms and of the activation; recomputing a block, all
/// but its input.
double saved_bytes_of_layer(const ModelConfig& model, const Sizes& s, int64_t e,
                            const std::string& recompute) {
  if (recompute == "block") return static_cast<double>(e * s.d);
  const int64_t cheap = recompute == "cheap" && model.family != "mlp" ? e * (2 * s.d + s.f) : 0;
  const int64_t log_sum_exp = 4 * model.n_heads;
  const int64_t masks = model.dropout > 0.0 ? 2 * s.d : 0;
  if (model.family == "gpt2")
    return static_cast<double>(e * (8 * s.d + 2 * s.f) + log_sum_exp + masks - cheap);
  if (model.family == "llama")
    return static_cast<double>(e * (6 * s.d + 2 * s.kv + 3 * s.f) + log_sum_exp - cheap);
  return static_cast<double>(e * (2 * s.d + 2 * s.f));
}

double saved_bytes(const ModelConfig& model, const Sizes& s, int64_t e, const MemoryConfig& memory) {
  const int64_t again = (s.layers + memory.recompute_every - 1) / memory.recompute_every;
  return static_cast<double>(again) * saved_bytes_of_layer(model, s, e, memory.recompute) +
         static_cast<double>(s.layers - again) * saved_bytes_of_layer(model, s, e, "none");
}

std::vector<UnitSpec> units_of(const ModelConfig& model, const Sizes& s) {
  const bool gpt2 = model.family == "gpt2", llama = model.family == "llama";
  const auto root = gpt2 ? gpt2_root : llama ? llama_root : mlp_root;
  const auto block = gpt2 ? gpt2_block : llama ? llama_block : mlp_block;
  Params norm = (gpt2 ? gpt2_norm : llama ? llama_norm : mlp_norm)(s);
  std::vector<UnitSpec> units{root(s)};
  for (int64_t layer = 0; layer < s.layers; ++layer) units.push_back(block(s, layer));
  if (model.tie_embeddings) {
    units[0].params.insert(units[0].params.end(), norm.begin(), norm.end());
  } else {
    norm.push_back({"lm_head.weight", {s.vocab, s.d}});
    units.push_back({kHeadUnit, std::move(norm)});
  }
  return units;
}

/// The weights that a token is multiplied with: the matrices of the blocks, and the head even when it is
/// tied.
int64_t matmul_params_of(const std::vector<UnitSpec>& units, const Sizes& s, bool tied) {
  int64_t total = tied ? s.vocab * s.d : 0;
  for (size_t unit = 1; unit < units.size(); ++unit) {
    for (const ParamSpec& param : units[unit].params) {
      if (param.shape.size() == 2) total += param.numel();
    }
  }
  return total;
}

void check_family(const ModelConfig& model) {
  if (model.family == "gpt2" || model.family == "llama" || model.family == "mlp") return;
  throw ConfigError("[plan.model_facts] model.family '{}' is unknown; choose gpt2, llama or mlp",
                    model.family);
}

}  // namespace

int64_t ParamSpec::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t UnitSpec::numel() const {
  return std::accumulate(params.begin(), params.end(), int64_t{0},
                         [](int64_t sum, const ParamSpec& param) { return sum + param.numel(); });
}

ModelConfig complete(ModelConfig model, int64_t seq_len) {
  if (model.n_kv_heads == 0) model.n_kv_heads = model.n_heads;
  if (model.d_ff == 0) model.d_ff = 4 * model.d_model;
  if (model.max_seq_len == 0) model.max_seq_len = seq_len;
  return model;
}

ModelFacts describe(const ModelConfig& incomplete, int64_t seq_len, const PrecisionConfig& precision,
                    const MemoryConfig& memory) {
  check_family(incomplete);
  const ModelConfig model = complete(incomplete, seq_len);
  const Sizes s(model);
  ModelFacts facts{.units = units_of(model, s)};
  for (const UnitSpec& unit : facts.units) facts.params += unit.numel();
  facts.matmul_params = matmul_params_of(facts.units, s, model.tie_embeddings);
  const double attention = model.family == "mlp" ? 0.0 : static_cast<double>(seq_len * s.d * s.layers);
  facts.flops_per_token = 6.0 * static_cast<double>(facts.matmul_params) + 6.0 * attention;
  const int64_t element_bytes = bytes_of(precision.compute);
  facts.saved_bytes_per_token = saved_bytes(model, s, element_bytes, memory);
  return facts;
}

}  // namespace trireme::plan
