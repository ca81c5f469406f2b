#include "trireme/plan/tensor_transfers.h"

#include <algorithm>
#include <string>

#include "trireme/plan/adapter.h"
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
  int64_t thin_gathers = 0, thin_scatters = 0;  ///< of rows as long as the rank of adapters
  int64_t lengths = 0;  ///< layers of which ranks sum two numbers for each feature that they make (DoRA)
  int64_t attentions = 0, repeated_attentions = 0, attention_gradients = 0;
  bool compares_logits = false;  ///< three numbers of each token are gathered

  Exchanges& operator+=(const Exchanges& other) {
    gathers += other.gathers;
    scatters += other.scatters;
    thin_gathers += other.thin_gathers;
    thin_scatters += other.thin_scatters;
    lengths += other.lengths;
    attentions += other.attentions;
    repeated_attentions += other.repeated_attentions;
    attention_gradients += other.attention_gradients;
    compares_logits = compares_logits || other.compares_logits;
    return *this;
  }
};
struct UnitExchanges {
  Exchanges forward, backward;

  UnitExchanges& operator+=(const UnitExchanges& other) {
    forward += other.forward;
    backward += other.backward;
    return *this;
  }
};

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

/// Half of a block, its layers that make features and the one behind them, by what it has to train.
struct Half {
  bool is_there = false;
  bool trains_in = false, trains_out = false;  ///< the weights
  int64_t adapters_in = 0, adapters_out = 0;   ///< of the layers that make features, and of the last one

  Half(const UnitSpec& unit, BlockLayer in, BlockLayer out) {
    for (const ParamSpec& param : unit.params) {
      if (param.layer != in && param.layer != out) continue;
      const bool enters = param.layer == in;
      is_there = is_there || enters;
      (enters ? trains_in : trains_out) |= !param.frozen;
      (enters ? adapters_in : adapters_out) += has_adapter(unit, param) ? 1 : 0;
    }
  }
};

/// The exchanges of a half. Where its input has no gradient, none is sent back.
struct HalfExchanges {
  UnitExchanges found;
  bool has_gradient;  ///< its output
};

/// A half enters its cut layers once and leaves them once, and so does its adapters' thin rows: each that is
/// at the entry for itself. Backward gathers the input of the first layers again where their weights are
/// trained, and the gradient of the last one's output; it sums the gradient of the input.
HalfExchanges exchanges_of(const Half& half, const ModelConfig& model, bool has_gradient) {
  const bool scales = model.adapter.kind == AdapterKind::kDora;
  // Of what comes through dropout and as it is, the product with the weight is made twice.
  const int64_t twice = scales && model.adapter.dropout > 0.0 ? 1 : 0;
  const int64_t in = 1 + twice * half.adapters_in, out = 1 + twice * half.adapters_out;
  const bool inner = has_gradient || half.trains_in || half.adapters_in > 0;
  HalfExchanges exchanges{.found = {}, .has_gradient = inner || half.trains_out || half.adapters_out > 0};
  exchanges.found.forward = {.gathers = in,
                             .scatters = out,
                             .thin_gathers = half.adapters_in,
                             .thin_scatters = half.adapters_out,
                             .lengths = scales ? half.adapters_out : 0};
  exchanges.found.backward = {.gathers = (half.trains_in ? in : 0) + (inner || half.trains_out ? out : 0),
                              .scatters = has_gradient ? in : 0,
                              .thin_gathers = half.adapters_in + half.adapters_out,
                              .thin_scatters = half.adapters_in};
  return exchanges;
}

/// The exchanges of a unit whose input has a gradient or not. A block that is computed again does not end
/// with its last product, unless something that is cut follows, or what reads the product.
UnitExchanges exchanges_of(const UnitSpec& unit, const Config& config, const ModelFacts& facts,
                           bool has_gradient) {
  const ModelConfig& model = config.model;
  const Half attention(unit, BlockLayer::kQkv, BlockLayer::kAttentionOutput),
      rest(unit, BlockLayer::kFeedForwardIn, BlockLayer::kFeedForwardOut);
  const int64_t attentions = attention.is_there ? 1 : 0;
  UnitExchanges found;
  if (attention.is_there) {
    const HalfExchanges of_half = exchanges_of(attention, model, has_gradient);
    found += of_half.found;
    found.forward += {.attentions = 1};
    const bool attends = has_gradient || attention.trains_in || attention.adapters_in > 0;
    found.backward += {.attention_gradients = attends ? 1 : 0};
    has_gradient = of_half.has_gradient;
  }
  if (rest.is_there) found += exchanges_of(rest, model, has_gradient).found;
  if (const int64_t layer = layer_of(unit, facts); layer >= 0 &&
                                                   computes_blocks_again(config.memory.recompute) &&
                                                   layer % config.memory.recompute_every == 0) {
    const bool whole = attention.is_there && rest.is_there,
               drops = record_of(model.family).drops && model.dropout > 0.0,
               scales = reads_last_product(unit) && model.adapter.dropout == 0.0;
    Exchanges again = found.forward;
    again.scatters -= whole && !drops && !scales ? 1 : 0;
    again.attentions = 0;
    again.repeated_attentions = whole && keeps_ring_output(config) ? 0 : attentions;
    found.backward += again;
  }
  if (looks_up_words(unit, model)) {
    found.forward += {.scatters = 1};
    found.backward += {.gathers = has_adapters(config) ? 0 : 1};
  }
  if (has_head(unit, model)) found.forward += {.gathers = 1, .scatters = 1, .compares_logits = true};
  return found;
}

/// The exchanges of each unit. Adapters leave what they have no part in without a gradient: the words, and
/// what comes before the first of them. What another stage has sent has one.
std::vector<UnitExchanges> exchanges_of(const std::vector<UnitSpec>& units, const Config& config,
                                        const ModelFacts& facts) {
  const auto has_words = [&](const UnitSpec& unit) { return looks_up_words(unit, config.model); };
  bool has_gradient = !has_adapters(config) || std::ranges::none_of(units, has_words);
  std::vector<UnitExchanges> all;
  for (const UnitSpec& unit : units) {
    all.push_back(exchanges_of(unit, config, facts, has_gradient || layer_of(unit, facts) > 0));
    has_gradient = has_gradient || !unit.trained().empty();
  }
  return all;
}

int64_t copied_elements(const UnitSpec& unit) {
  int64_t elements = 0;
  for (const ParamSpec& param : unit.params)
    elements += param.part.copies > 1 && !param.frozen ? param.numel() : 0;
  return elements;
}

class Adder {
 public:
  Adder(const Config& config, const ModelFacts& facts, const BatchPlan& batch)
      : ranks_(facts.split.ranks),
        contexts_(facts.split.contexts),
        tokens_(batch.micro_batch * config.data.seq_len / contexts_),
        row_bytes_(config.model.d_model * bytes_of(config.precision.compute)),
        thin_bytes_(config.model.adapter.rank * bytes_of(config.precision.compute)),
        length_bytes_(2 * config.model.d_model * kFp32Bytes),
        attention_(attention_of(config, facts, tokens_)) {}

  void add(Action& action, const Exchanges& exchanges) const {
    const int64_t rows = tokens_ * row_bytes_, thin = tokens_ * thin_bytes_,
                  numbers = exchanges.compares_logits ? ranks_ * kNumbers * tokens_ * kFp32Bytes : 0;
    const auto gather = [this](int64_t bytes) { return wire_bytes(Collective::kAllGather, bytes, ranks_); };
    add(action, Collective::kAllGather,
        exchanges.gathers * gather(rows) + exchanges.thin_gathers * gather(thin) +
            exchanges.lengths * gather(ranks_ * length_bytes_) + gather(numbers));
    add(action, Collective::kAllToAll,
        exchanges.scatters * wire_bytes(Collective::kAllToAll, rows, ranks_) +
            exchanges.thin_scatters * wire_bytes(Collective::kAllToAll, thin, ranks_));
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

  int64_t ranks_, contexts_, tokens_, row_bytes_, thin_bytes_, length_bytes_;
  AttentionBytes attention_;
};

}  // namespace

void add_tensor_transfers(StepProgram& program, const std::vector<UnitSpec>& units, const Config& config,
                          const ModelFacts& facts, const BatchPlan& batch) {
  if (facts.split.ranks == 1 && facts.split.contexts == 1) return;
  const Adder adder(config, facts, batch);
  const std::vector<UnitExchanges> of_units = exchanges_of(units, config, facts);
  UnitExchanges of_model;
  for (const UnitExchanges& exchanges : exchanges_of(facts.units, config, facts)) of_model += exchanges;
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
