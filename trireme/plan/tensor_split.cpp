#include "trireme/plan/tensor_split.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/nf4_format.h"
#include "trireme/plan/flat_layout.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/stages.h"

namespace trireme::plan {
namespace {

/// The parameter with the matrices that lie side by side in dimension `dim` as a dimension of their own.
Shape unpacked(Shape shape, int64_t packed, size_t dim) {
  shape[dim] /= packed;
  shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(dim), packed);
  return shape;
}

/// `held` is a rank's version of `whole`, which differs in one dimension at most. Ranks have equal parts, or,
/// if they outnumber them, several have the same; of a vocabulary they have those from row `first_word` on.
ParamSpec part_of(const ParamSpec& whole, ParamSpec held, const TensorSplit& at, int64_t first_word,
                  bool is_vocabulary) {
  Part& part = held.part;
  held.initial = whole.initial;  // some depend on the size of the whole
  const auto differs = std::ranges::mismatch(whole.shape, held.shape);
  if (differs.in1 == whole.shape.end()) {
    part.copies = at.ranks;
    part.copy = at.rank;
    return held;
  }
  const auto dim = static_cast<size_t>(differs.in1 - whole.shape.begin());
  part.whole = whole.shape;
  if (whole.packed > 1) {
    part.view = unpacked(whole.shape, whole.packed, dim);
    part.extent = unpacked(held.shape, whole.packed, dim);
  }
  const size_t cut = dim + (part.view.empty() ? 0 : 1);
  part.start = Shape(part.view.empty() ? whole.shape.size() : part.view.size(), 0);
  int64_t& start = part.start[cut];
  if (is_vocabulary) {
    start = first_word;
    return held;
  }
  part.copies = at.ranks * *differs.in2 / *differs.in1;
  part.copy = at.rank % part.copies;
  start = at.rank / part.copies * (part.view.empty() ? *differs.in2 : part.extent[cut]);
  return held;
}

bool can_share(const ModelConfig& model, int64_t ranks) {
  const int64_t kv = model.n_kv_heads;
  return model.n_heads % ranks == 0 && model.d_ff % ranks == 0 && (kv % ranks == 0 || ranks % kv == 0);
}

/// The model of one of several ranks that can share it, but for its vocabulary.
ModelConfig share_of(const ModelConfig& model, int64_t ranks) {
  ModelConfig share = model;
  share.head_dim = head_dim(model);
  share.n_heads = model.n_heads / ranks;
  share.n_kv_heads = std::max<int64_t>(1, model.n_kv_heads / ranks);
  share.d_ff = model.d_ff / ranks;
  return share;
}

/// Elements that follow each other in the whole parameter and are on one rank.
int64_t run_of(const ParamSpec& whole, const ParamSpec& held) {
  const auto differs = std::ranges::mismatch(whole.shape, held.shape);
  int64_t run = 1;
  for (auto size = differs.in2; size != held.shape.end(); ++size) run *= *size;
  return differs.in2 == held.shape.end() ? held.numel() : run / whole.packed;
}

/// A scale of NF4 is that of elements of one rank, so that values do not depend on how many there are.
std::string nf4_obstacle(const ModelConfig& model, int64_t ranks) {
  if (model.adapter.base != AdapterBase::kNf4) return {};
  const ModelFamilyRecord& family = record_of(model.family);
  const std::vector<ParamSpec> whole = family.block(model, 0).params,
                               held = family.block(share_of(model, ranks), 0).params;
  for (size_t i = 0; i < whole.size(); ++i) {
    if (!whole[i].layer || run_of(whole[i], held[i]) % kNf4Block == 0) continue;
    return fmt::format(
        "each of {} ranks would have {} neighbouring elements of {}, and NF4 has a scale for every {}; use "
        "fewer ranks, or adapter.base=model",
        ranks, run_of(whole[i], held[i]), whole[i].name, kNf4Block);
  }
  return {};
}

std::vector<int64_t> numbers_that_can_share(const ModelConfig& model) {
  std::vector<int64_t> numbers;
  for (int64_t ranks = 1; ranks <= model.n_heads; ++ranks) {
    if (can_share(model, ranks)) numbers.push_back(ranks);
  }
  return numbers;
}

}  // namespace

TensorSplit tensor_split(const MeshShape& mesh, int64_t rank) {
  return {mesh.size(Axis::kTp), mesh.coordinates(rank)[static_cast<size_t>(Axis::kTp)], mesh.size(Axis::kCp)};
}

std::string split_obstacle(const ModelConfig& model, int64_t ranks) {
  if (ranks == 1) return {};
  if (reads_images(model.family) || !record_of(model.family).attends)
    return fmt::format("models of family {} have no heads to share out; use gpt2 or llama", model.family);
  if (!can_share(model, ranks)) {
    return fmt::format(
        "{} ranks cannot share {} heads, {} key and value heads and {} features of the feed-forward part "
        "equally; heads and features can be shared by {} ranks",
        ranks, model.n_heads, model.n_kv_heads, model.d_ff, fmt::join(numbers_that_can_share(model), ", "));
  }
  if (constexpr int64_t kLeastRows = FlatLayout::kAlignment; model.vocab_size < kLeastRows * ranks) {
    return fmt::format(
        "{} ranks cannot share a vocabulary of {} rows, {} or more each; raise model.vocab_size", ranks,
        model.vocab_size, kLeastRows);
  }
  return nf4_obstacle(model, ranks);
}

std::vector<int64_t> split_vocabulary(const ModelConfig& model, int64_t ranks) {
  return share_rows(model.vocab_size, ranks, model.d_model);
}

ModelConfig split_model(const ModelConfig& model, const TensorSplit& split) {
  if (split.ranks == 1) return model;
  if (const std::string obstacle = split_obstacle(model, split.ranks); !obstacle.empty())
    throw ConfigError("[plan.split] {}", obstacle);
  ModelConfig part = share_of(model, split.ranks);
  const std::vector<int64_t> rows = split_vocabulary(model, split.ranks);
  const auto rank = static_cast<size_t>(split.rank);
  part.vocab_size = rows[rank + 1] - rows[rank];
  return part;
}

namespace {

/// Units hold a rank's parts.
std::vector<UnitSpec> parts_of(const std::vector<UnitSpec>& whole, std::vector<UnitSpec> held,
                               const TensorSplit& at, int64_t first_word) {
  for (size_t unit = 0; unit < held.size(); ++unit) {
    const bool has_words = unit == 0 || held[unit].name == kHeadUnit;
    for (size_t i = 0; i < held[unit].params.size(); ++i) {
      ParamSpec& param = held[unit].params[i];
      param = part_of(whole[unit].params[i], param, at, first_word, has_words);
    }
  }
  return held;
}

}  // namespace

int64_t kept_as_rows(const ModelConfig& model, const PrecisionConfig& precision, const MemoryConfig& memory,
                     const TensorSplit& split, int64_t layer, BlockPart part) {
  const bool again = layer % memory.recompute_every == 0 &&
                     (computes_blocks_again(memory.recompute) || memory.recompute == Recompute::kCheap);
  const bool adapted = model.adapter.kind != AdapterKind::kNone;  // frozen layers keep no rows
  if (split.ranks == 1 || again || adapted || !multiplies_in_fp8(precision.fp8, layer, model.n_layers))
    return 0;
  const int64_t layers = part == BlockPart::kWhole ? 2 : 1;  // queries, keys and values; feed-forward
  return layers * model.d_model * (bytes_of(precision.compute) - 1);
}

ModelFacts describe(const ModelConfig& incomplete, int64_t seq_len, const PrecisionConfig& precision,
                    const MemoryConfig& memory, const TensorSplit& at) {
  ModelFacts facts = describe(incomplete, seq_len, precision, memory);
  facts.split = at;
  if (at.ranks > 1) {
    const ModelConfig model = complete(incomplete, seq_len);
    const int64_t first_word = split_vocabulary(model, at.ranks)[static_cast<size_t>(at.rank)];
    facts.units = parts_of(facts.units, describe(split_model(model, at), seq_len, precision, memory).units,
                           at, first_word);
    facts.params = 0;
    for (const UnitSpec& unit : facts.units) facts.params += unit.numel();
    facts.matmul_params /= at.ranks;
    for (int64_t layer = 0; layer < model.n_layers; ++layer)
      facts.saved_bytes_per_token += static_cast<double>(kept_as_rows(model, precision, memory, at, layer));
  }
  const auto shares = static_cast<double>(at.ranks * at.contexts);
  facts.flops_per_token /= shares;
  facts.saved_bytes_per_token /= shares;
  return facts;
}

}  // namespace trireme::plan
