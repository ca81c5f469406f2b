// Residual feed-forward blocks over single positions: nn/mlp.h.
#include <fmt/format.h>

#include "trireme/plan/family_parts.h"

namespace trireme::plan::mlp {
namespace {

std::vector<ParamSpec> embeddings(const ModelConfig& model) {
  return {matrix(model, "embed.weight", {model.vocab_size, model.d_model})};
}

UnitSpec block(const ModelConfig& model, int64_t layer) {
  const int64_t d = model.d_model, f = model.d_ff;
  const std::string name = fmt::format("blocks.{}", layer);
  return {
      name,
      {ones(name + ".norm.weight", d), matrix(model, name + ".up.weight", {f, d}, BlockLayer::kFeedForwardIn),
       residual_matrix(model, name + ".down.weight", {d, f}, BlockLayer::kFeedForwardOut)}};
}

std::vector<ParamSpec> final_norm(const ModelConfig& model) {
  return {ones("norm.weight", model.d_model)};
}

BlockLinears linears(const ModelConfig& model) {
  const int64_t both = model.d_model + model.d_ff;
  return {.attention = {}, .rest = {.taken = both, .made = both}};
}

/// Input and output of the norm; the feed-forward before and after SiLU.
int64_t saved_bytes(const ModelConfig& model, int64_t element_bytes) {
  return element_bytes * (2 * model.d_model + 2 * model.d_ff);
}

}  // namespace
}  // namespace trireme::plan::mlp

namespace trireme::plan {
const ModelFamilyRecord kMlpRecord = {.family = ModelFamily::kMlp,
                                      .attends = false,
                                      .drops = false,
                                      .embeddings = mlp::embeddings,
                                      .block = mlp::block,
                                      .attention_params = 0,
                                      .final_norm = mlp::final_norm,
                                      .linears = mlp::linears,
                                      .saved_bytes = mlp::saved_bytes,
                                      .cheap_bytes = nullptr,
                                      .check = nullptr};

}  // namespace trireme::plan
