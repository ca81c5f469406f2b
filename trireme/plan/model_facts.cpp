#include "trireme/plan/model_facts.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>

#include "trireme/plan/adapter.h"
#include "trireme/plan/family_parts.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/vision_model.h"

namespace trireme::plan {
namespace {

std::vector<UnitSpec> units_of(const ModelConfig& model, const Fp8Config& fp8) {
  const ModelFamilyRecord& family = record_of(model.family);
  std::vector<UnitSpec> units{{kRootUnit, family.embeddings(model)}};
  for (int64_t layer = 0; layer < model.n_layers; ++layer) {
    units.push_back(family.block(model, layer));
    if (gathers_fp8(fp8, layer, model.n_layers)) units.back().fp8_block = layer;
  }
  std::vector<ParamSpec> head = family.final_norm(model);
  if (model.tie_embeddings) {
    units[0].params.insert(units[0].params.end(), head.begin(), head.end());
  } else {
    head.push_back(matrix(model, "lm_head.weight", {model.vocab_size, model.d_model}));
    units.push_back({kHeadUnit, std::move(head)});
  }
  adapt(units, model);
  return units;
}

/// The weights that a token is multiplied with: the matrices of the blocks, and the head even when it is
/// tied.
struct MatmulParams {
  int64_t all = 0;
  int64_t frozen = 0;  ///< those of which no gradient is computed
};

MatmulParams matmul_params_of(const std::vector<UnitSpec>& units, const ModelConfig& model) {
  const int64_t tied = model.tie_embeddings ? model.vocab_size * model.d_model : 0;
  MatmulParams total{.all = tied, .frozen = units[0].params[0].frozen ? tied : 0};
  for (size_t unit = 1; unit < units.size(); ++unit) {
    for (const ParamSpec& param : units[unit].params) {
      if (param.shape.size() != 2) continue;
      total.all += param.numel();
      if (param.frozen) total.frozen += param.numel();
    }
  }
  return total;
}

LinearFeatures operator+(const LinearFeatures& a, const LinearFeatures& b) {
  return {.taken = a.taken + b.taken, .made = a.made + b.made, .biased = a.biased + b.biased};
}

double saved_bytes(const ModelConfig& model, int64_t seq_len, const PrecisionConfig& precision,
                   const MemoryConfig& memory) {
  double bytes = 0.0;
  for (int64_t layer = 0; layer < model.n_layers; ++layer)
    bytes += static_cast<double>(block_bytes(model, seq_len, precision, memory, layer).saved);
  return bytes;
}

/// The bytes that attention of one token keeps with model.attention=eager, beyond what fused kernels do: a
/// copy of the queries, and of the keys and values of each, in place of those in one piece; probabilities in
/// fp32, and once more as they meet the values where they are rounded or dropped, with a byte of the mask.
/// Fused kernels keep an fp32 log-sum-exp a head.
int64_t eager_bytes(const ModelConfig& model, int64_t seq_len, int64_t element) {
  if (model.attention != AttentionKind::kEager) return 0;
  const int64_t copies = 2 * (query_width(model) - kv_width(model));
  const bool drops = model.dropout > 0.0;
  const int64_t of_score = kFp32Bytes + (drops || element < kFp32Bytes ? element : 0) + (drops ? 1 : 0);
  return element * copies + model.n_heads * (seq_len * of_score - kFp32Bytes);
}

}  // namespace

int64_t ParamSpec::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

std::vector<ParamSpec> UnitSpec::trained() const {
  std::vector<ParamSpec> some;
  std::ranges::copy_if(params, std::back_inserter(some), std::logical_not<>(), &ParamSpec::frozen);
  return some;
}

std::vector<ParamSpec> UnitSpec::frozen() const {
  std::vector<ParamSpec> some;
  std::ranges::copy_if(params, std::back_inserter(some), std::identity(), &ParamSpec::frozen);
  return some;
}

int64_t UnitSpec::numel() const {
  return std::accumulate(params.begin(), params.end(), int64_t{0},
                         [](int64_t sum, const ParamSpec& param) { return sum + param.numel(); });
}

/// A block, or a half of one, that is computed again keeps its input; a whole block may keep attention's
/// output and an fp32 log-sum-exp a head, too. With FP8 the inputs of linear layers
/// are kept in one byte an element: what is cheap to compute again, and attention's output beside itself. A
/// frozen layer keeps no input, and its adapter keeps what it reads in the dtype of computation.
BlockBytes block_bytes(const ModelConfig& model, int64_t seq_len, const PrecisionConfig& precision,
                       const MemoryConfig& memory, int64_t layer, BlockPart part) {
  const ModelFamilyRecord& family = record_of(model.family);
  const int64_t element = bytes_of(precision.compute);
  const bool attends = part != BlockPart::kRest, again = layer % memory.recompute_every == 0,
             fp8 = multiplies_in_fp8(precision.fp8, layer, model.n_layers);
  const auto [attention, rest] = family.linears(model);
  const LinearFeatures whole = attention + rest, linears = part == BlockPart::kWhole ? whole
                                                           : attends                 ? attention
                                                                                     : rest;
  BlockBytes bytes;
  bytes.between_halves = fp8 ? linears.taken + linears.made + element * linears.biased
                             : element * (linears.taken + linears.made);
  if (again && computes_blocks_again(memory.recompute)) {
    bytes.saved = element * model.d_model;
    if (memory.recompute == Recompute::kAllButAttention && part == BlockPart::kWhole && family.attends)
      bytes.saved += element * query_width(model) + 4 * model.n_heads;
    return bytes;
  }
  int64_t cheap = family.cheap_bytes == nullptr ? 0 : family.cheap_bytes(model, element);
  if (cheap > 0 && part == BlockPart::kAttention) cheap -= element * rest.taken;
  if (cheap > 0 && part == BlockPart::kRest) cheap = element * rest.taken;
  bytes.saved = element * (linears.taken + linears.made) - cheap + adapter_bytes(model, part, element);
  if (attends)
    bytes.saved += family.saved_bytes(model, element) - element * (whole.taken + whole.made) +
                   eager_bytes(model, seq_len, element);
  const bool adapted = model.adapter.kind != AdapterKind::kNone;
  if (attends && fp8 && !adapted) bytes.saved += query_width(model);
  if (!again || memory.recompute != Recompute::kCheap)
    bytes.saved += adapted ? read_bytes(model, part, element) : fp8 ? cheap / element : cheap;
  return bytes;
}

int64_t score_gradient_bytes(const ModelConfig& model, int64_t seq_len) {
  return model.attention == AttentionKind::kEager ? 2 * kFp32Bytes * model.n_heads * seq_len : 0;
}

int64_t head_dim(const ModelConfig& model) {
  return model.head_dim > 0 ? model.head_dim : model.d_model / model.n_heads;
}

ModelConfig complete(ModelConfig model, int64_t seq_len) {
  if (reads_images(model.family)) return complete_vision(std::move(model));
  if (model.n_kv_heads == 0) model.n_kv_heads = model.n_heads;
  if (model.d_ff == 0) model.d_ff = 4 * model.d_model;
  if (model.max_seq_len == 0) model.max_seq_len = seq_len;
  return model;
}

ModelFacts describe(const ModelConfig& incomplete, int64_t seq_len, const PrecisionConfig& precision,
                    const MemoryConfig& memory) {
  const ModelConfig model = complete(incomplete, seq_len);
  if (reads_images(model.family)) {
    VisionFacts vision = describe(model.vision, precision, memory);
    return {.units = std::move(vision.units),
            .buffers = std::move(vision.buffers),
            .params = vision.params,
            .matmul_params = 0,
            .flops_per_token = vision.flops_per_image,
            .saved_bytes_per_token = vision.saved_bytes_per_image,
            .saved_on_gpu = vision.saved_on_gpu};
  }
  ModelFacts facts{.units = units_of(model, precision.fp8)};
  for (const UnitSpec& unit : facts.units) facts.params += unit.numel();
  const MatmulParams matmul = matmul_params_of(facts.units, model);
  facts.matmul_params = matmul.all;
  facts.frozen_matmul_params = matmul.frozen;
  const bool attends = record_of(model.family).attends;
  const double attention = attends ? static_cast<double>(seq_len * query_width(model) * model.n_layers) : 0.0;
  facts.flops_per_token =
      6.0 * static_cast<double>(matmul.all) - 2.0 * static_cast<double>(matmul.frozen) + 6.0 * attention;
  facts.saved_bytes_per_token = saved_bytes(model, seq_len, precision, memory);
  return facts;
}

}  // namespace trireme::plan
