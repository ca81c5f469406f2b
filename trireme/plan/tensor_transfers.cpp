#include "trireme/plan/tensor_transfers.h"

#include <algorithm>
#include <string>

#include "trireme/plan/model_family.h"
#include "trireme/plan/recompute.h"
#include "trireme/plan/stored_dtype.h"
#include "trireme/plan/tensor_split.h"
#include "trireme/plan/token_split.h"

namespace trireme::plan {
namespace {

/// How often the rows of a micro-batch are gathered and summed over the ranks along tp, and how often those
/// along cp compute attention together, compute it again, and its gradient.
struct Exchanges {
  int64_t gathers = 0, scatters = 0;
  int64_t attentions = 0, repeated_attentions = 0, attention_gradients = 0;
  bool compares_logits = false;  ///< three numbers of each token are gathered

  Exchanges& operator+=(const Exchanges& other) {
    gathers += other.gathers;
    scatters += other.scatters;
    attentions += other.attentions;
    repeated_attentions += other.repeated_attentions;
    attention_gradients += other.attention_gradients;
    compares_logits = compares_logits || other.compares_logits;
    return *this;
  }
};
struct UnitExchanges {
  Exchanges forward, backward;
};

bool has_layer(const UnitSpec& unit, BlockLayer layer) {
  return std::ranges::any_of(unit.params, [layer](const ParamSpec& param) { return param.layer == layer; });
}

/// The words of the first stage; a copy of them elsewhere is the head.
bool looks_up_words(const UnitSpec& unit, const ModelConfig& model) {
  const std::string words = record_of(model.family).embeddings(model).front().name;
  return std::ranges::any_of(
      unit.params, [&](const ParamSpec& param) { return param.name == words && param.part.copy == 0; });
}

/// The head is where the norm before it is.
bool has_head(const UnitSpec& unit, const ModelConfig& model) {
  const std::string norm = record_of(model.family).final_norm(model).front().name;
  return std::ranges::find(unit.params, norm, &ParamSpec::name) != unit.params.end();
}

/// The block that a unit is, or half of; -1: it is none.
int64_t layer_of(const UnitSpec& unit, const ModelFacts& facts) {
  std::string name = unit.name;
  for (const std::string half : {kAttentionHalf, kMlpHalf}) {
    if (name.ends_with(half)) name.erase(name.size() - half.size());
  }
  const auto found = std::ranges::find(facts.units, name, &UnitSpec::name);
  const int64_t layer = found - facts.units.begin() - 1;
  return found == facts.units.end() || unit.name == kRootUnit || unit.name == kHeadUnit ? -1 : layer;
}

/// Whether the output that a whole block keeps is that of a ring, which then need not go around again.
bool keeps_ring_output(const Config& config) {
  return config.memory.recompute == Recompute::kAllButAttention && settled_cp_kind(config) == CpKind::kRing;
}

/// Each half of a block enters its cut layers once and leaves them once. Backward gathers the input of the
/// first layers again, and the gradient of the last one's output; it sums the gradient of the input. A block
/// that is computed again does not end with its last product, unless dropout or what is cut follows.
UnitExchanges exchanges_of(const UnitSpec& unit, const Config& config, const ModelFacts& facts) {
  const ModelConfig& model = config.model;
  UnitExchanges found;
  const bool attention = has_layer(unit, BlockLayer::kQkv),
             rest = has_layer(unit, BlockLayer::kFeedForwardIn);
  const int64_t attentions = attention ? 1 : 0, halves = attentions + (rest ? 1 : 0);
  found.forward += {.gathers = halves, .scatters = halves, .attentions = attentions};
  found.backward += {.gathers = 2 * halves, .scatters = halves, .attention_gradients = attentions};
  if (const int64_t layer = layer_of(unit, facts); layer >= 0 &&
                                                   computes_blocks_again(config.memory.recompute) &&
                                                   layer % config.memory.recompute_every == 0) {
    const bool drops = record_of(model.family).drops && model.dropout > 0.0;
    found.backward += {.gathers = halves,
                       .scatters = halves - (halves == 2 && !drops ? 1 : 0),
                       .repeated_attentions = halves == 2 && keeps_ring_output(config) ? 0 : attentions};
  }
  if (looks_up_words(unit, model)) {
    found.forward += {.scatters = 1};
    found.backward += {.gathers = 1};
  }
  if (has_head(unit, model)) found.forward += {.gathers = 1, .scatters = 1, .compares_logits = true};
  return found;
}

int64_t copied_elements(const UnitSpec& unit) {
  int64_t elements = 0;
  for (const ParamSpec& param : unit.params) elements += param.part.copies > 1 ? param.numel() : 0;
  return elements;
}

class Adder {
 public:
  Adder(const Config& config, const ModelFacts& facts, const BatchPlan& batch)
      : ranks_(facts.split.ranks),
        contexts_(facts.split.contexts),
        tokens_(batch.micro_batch * config.data.seq_len / contexts_),
        row_bytes_(config.model.d_model * bytes_of(config.precision.compute)),
        attention_(attention_of(config, facts, tokens_)) {}

  void add(Action& action, const Exchanges& exchanges) const {
    const int64_t rows = tokens_ * row_bytes_, numbers = ranks_ * kNumbers * tokens_ * kFp32Bytes;
    const int64_t gathered =
        exchanges.gathers * wire_bytes(Collective::kAllGather, rows, ranks_) +
        (exchanges.compares_logits ? wire_bytes(Collective::kAllGather, numbers, ranks_) : 0);
    add(action, Collective::kAllGather, gathered);
    add(action, Collective::kAllToAll, exchanges.scatters * wire_bytes(Collective::kAllToAll, rows, ranks_));
    const int64_t exchanged = exchanges.attentions * attention_.forward +
                              exchanges.repeated_attentions * attention_.again +
                              exchanges.attention_gradients * attention_.backward;
    if (exchanged > 0) action.transfers.push_back({attention_.collective, contexts_, exchanged, Along::kCp});
  }
  void add_copies(Action& action, int64_t elements) const {
    add(action, Collective::kAllGather,
        wire_bytes(Collective::kAllGather, ranks_ * elements * kFp32Bytes, ranks_));
  }

 private:
  static constexpr int64_t kNumbers = 3;  ///< that ranks exchange for the loss of a token

  void add(Action& action, Collective collective, int64_t bytes) const {
    if (bytes > 0) action.transfers.push_back({collective, ranks_, bytes, Along::kTp});
  }
  static AttentionBytes attention_of(const Config& config, const ModelFacts& facts, int64_t tokens) {
    if (facts.split.contexts == 1) return {};
    const ModelConfig held = split_model(complete(config.model, config.data.seq_len), facts.split);
    return attention_bytes(config, settled_cp_kind(config), held, tokens);
  }

  int64_t ranks_, contexts_, tokens_, row_bytes_;
  AttentionBytes attention_;
};

}  // namespace

void add_tensor_transfers(StepProgram& program, const std::vector<UnitSpec>& units, const Config& config,
                          const ModelFacts& facts, const BatchPlan& batch) {
  if (facts.split.ranks == 1 && facts.split.contexts == 1) return;
  const Adder adder(config, facts, batch);
  UnitExchanges of_model;
  std::vector<UnitExchanges> of_units;
  for (const UnitSpec& unit : units) {
    of_units.push_back(exchanges_of(unit, config, facts));
  }
  for (const UnitSpec& unit : facts.units) {
    const UnitExchanges exchanges = exchanges_of(unit, config, facts);
    of_model.forward += exchanges.forward;
    of_model.backward += exchanges.backward;
  }
  for (Action& action : program.actions) {
    const bool whole = action.unit == Action::kWholeModel;
    if (action.kind == ActionKind::kReduce && !whole)
      adder.add_copies(action, copied_elements(units[static_cast<size_t>(action.unit)]));
    if (!action.computes() || action.kind == ActionKind::kBackwardWeight) continue;
    const UnitExchanges& exchanges = whole ? of_model : of_units[static_cast<size_t>(action.unit)];
    adder.add(action, action.kind == ActionKind::kForward ? exchanges.forward : exchanges.backward);
  }
}

}  // namespace trireme::plan
