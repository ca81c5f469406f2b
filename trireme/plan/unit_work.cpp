#include "trireme/plan/unit_work.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/family_parts.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

/// A linear layer of a unit: neighbours in memory on one input are one product.
struct LinearWork {
  int64_t in = 0, out = 0;
  bool frozen = false;
  std::optional<BlockLayer> layer = {};  ///< none: the head, or part of an adapter
};

/// The place of an adapter's parameter: the group of layers on one input, and whether it is their A.
struct AdapterGroup {
  BlockLayer layer;
  bool reads = false;

  bool operator==(const AdapterGroup&) const = default;
};

std::optional<AdapterGroup> adapter_group(const UnitSpec& unit, const ParamSpec& param) {
  for (const ParamSpec& weight : unit.params) {
    if (!weight.layer) continue;
    const AdapterNames names = adapter_names(weight.name);
    if (param.name == names.first) return AdapterGroup{*weight.layer, true};
    if (param.name == names.second) return AdapterGroup{*weight.layer, false};
  }
  return std::nullopt;
}

bool is_matrix(const ParamSpec& param) {
  return param.shape.size() == 2;
}

/// All A of layers on one input are one product, and so are all B, of blocks that share no feature.
std::vector<LinearWork> linear_layers_of(const UnitSpec& unit, bool in_out) {
  std::vector<LinearWork> layers;
  std::optional<AdapterGroup> last;
  for (const ParamSpec& param : unit.params) {
    if (!is_matrix(param)) continue;
    // Adapters lie as (out, in) in every family.
    const bool turned = in_out && param.layer.has_value();
    const LinearWork one{.in = param.shape[turned ? 0 : 1],
                         .out = param.shape[turned ? 1 : 0],
                         .frozen = param.frozen,
                         .layer = param.layer};
    const std::optional<AdapterGroup> group = adapter_group(unit, param);
    const bool joins =
        !layers.empty() && layers.back().layer == one.layer && group == last && (one.layer || group);
    last = group;
    if (!joins) {
      layers.push_back(one);
      continue;
    }
    layers.back().out += one.out;
    if (group && !group->reads) layers.back().in += one.in;
  }
  return layers;
}

bool has_param(const UnitSpec& unit, const std::string& name, bool copies) {
  return std::ranges::any_of(unit.params, [&](const ParamSpec& param) {
    return param.name == name && (copies || param.part.copy == 0);
  });
}

/// Whether it is added to the output of a linear layer of the unit; norms have biases, too.
bool is_bias_of_layer(const ParamSpec& param, const UnitSpec& unit) {
  constexpr std::string_view kBias = "bias";
  if (param.shape.size() != 1 || !param.name.ends_with(kBias)) return false;
  const std::string weight = param.name.substr(0, param.name.size() - kBias.size()) + "weight";
  return std::ranges::any_of(
      unit.params, [&](const ParamSpec& other) { return other.name == weight && is_matrix(other); });
}

/// Adds up the operations of the units of one rank.
class WorkCounter {
 public:
  WorkCounter(const Config& config, const ModelFacts& facts, const BatchPlan& batch, Device device,
              const Rates& rates)
      : config_(config),
        held_(split_model(complete(config.model, config.data.seq_len), facts.split)),
        family_(record_of(config.model.family)),
        rates_(rates),
        dtype_(rate_dtype(config.precision.compute)),
        memory_(rates.memory_of(dtype_)),
        on_gpu_(device == Device::kCuda),
        element_(static_cast<double>(bytes_of(config.precision.compute))),
        tokens_(static_cast<double>(batch.micro_batch * config.data.seq_len / facts.split.contexts)),
        rows_(tokens_ / static_cast<double>(facts.split.ranks)) {}

  UnitWork block(const UnitSpec& unit, int64_t layer);
  void add_words(UnitWork& work, const UnitSpec& root) const;
  void add_head(UnitWork& work, const ParamSpec& weight) const;
  /// The norm before the head, and whatever vectors a unit has.
  void add_norms(UnitWork& work, const UnitSpec& unit) const;

 private:
  static Work pass_of(KernelKind kind, double bytes, double rate, TimeCause cause = TimeCause::kMemory) {
    return {cause, bytes / rate, kind, 0.0, bytes};
  }
  double moved(double features, double rows) const { return features * rows * element_; }
  void add_linear(UnitWork& work, const LinearWork& layer, bool fp8) const;
  void add_lengths(UnitWork& work, const UnitSpec& unit) const;
  void add_attention(UnitWork& work) const;
  void add_eager_attention(UnitWork& work) const;
  void add_fused_attention(UnitWork& work) const;
  void add_activation(UnitWork& work, double inner) const;
  void add_again(UnitWork& work, const UnitSpec& unit, int64_t layer, size_t last_product) const;

  static constexpr size_t kNone = std::numeric_limits<size_t>::max();

  const Config& config_;
  ModelConfig held_;
  const ModelFamilyRecord& family_;
  const Rates& rates_;
  std::string dtype_;
  const MemoryRates& memory_;
  bool on_gpu_;
  double element_;
  double tokens_;  ///< of a micro-batch, whose products a rank computes parts of
  double rows_;    ///< of which it has all features
};

void WorkCounter::add_linear(UnitWork& work, const LinearWork& layer, bool fp8) const {
  const auto in = static_cast<double>(layer.in), out = static_cast<double>(layer.out);
  const std::string dtype = fp8 ? "fp8" : dtype_;
  const double operand = fp8 ? 1.0 : element_;
  const auto product = [&](std::vector<Work>& to, ProductPass pass, double m, double n, double k) {
    to.push_back({TimeCause::kProducts, rates_.product(dtype, pass, m, n, k), KernelKind::kGemm,
                  2.0 * m * n * k, (m * k + k * n) * operand + m * n * element_});
  };
  // Each operand is cast once for the products along its rows and once along its columns.
  constexpr double kCast = 2.0;
  const auto cast = [&](double features) -> Work {
    return {TimeCause::kMemory, tokens_ * features * (element_ + kCast) / memory_.add};
  };
  if (fp8) work.forward.push_back(cast(in));
  // Weights that lie as (in, out) have gradients that do, too.
  const bool turned = family_.in_out && layer.layer.has_value();
  product(work.forward, turned ? ProductPass::kInput : ProductPass::kForward, tokens_, out, in);
  if (fp8) work.backward_input.push_back(cast(out));
  product(work.backward_input, turned ? ProductPass::kForward : ProductPass::kInput, tokens_, in, out);
  if (layer.frozen) return;
  product(work.backward_weight, ProductPass::kWeight, turned ? in : out, turned ? out : in, tokens_);
}

/// DoRA reads a weight twice for the lengths of its rows, then gives the rows of the output theirs, whose
/// gradient reads that output. With dropout the weight is multiplied a second time, with what was kept.
void WorkCounter::add_lengths(UnitWork& work, const UnitSpec& unit) const {
  for (const ParamSpec& weight : unit.params) {
    const std::string magnitude = adapter_names(weight.name).magnitude;
    const auto found = std::ranges::find(unit.params, magnitude, &ParamSpec::name);
    if (!is_matrix(weight) || found == unit.params.end()) continue;
    const int64_t out = found->shape.front(), in = weight.numel() / out;
    const auto features = static_cast<double>(out);
    if (held_.adapter.dropout > 0.0)
      add_linear(work, {.in = in, .out = out, .frozen = true, .layer = weight.layer}, /*fp8=*/false);
    const double read = 2.0 * static_cast<double>(weight.numel()) * element_;
    work.forward.push_back(pass_of(KernelKind::kOther, read, memory_.copy));
    work.forward.push_back(pass_of(KernelKind::kOther, moved(2.0 * features, tokens_), memory_.add));
    work.backward_input.push_back(pass_of(KernelKind::kOther, moved(3.0 * features, tokens_), memory_.add));
  }
}

/// Products of all tokens with all, of which the mask hides half, and passes over the scores: forward the
/// mask is added, and the softmax reads and writes fp32, as does its gradient.
void WorkCounter::add_eager_attention(UnitWork& work) const {
  const auto length = static_cast<double>(config_.data.seq_len), width = static_cast<double>(head_dim(held_));
  const double rows = tokens_ * static_cast<double>(held_.n_heads), scores = rows * length;
  const auto product = [&](std::vector<Work>& to, double n, double k) {
    to.push_back({TimeCause::kAttention, rates_.product(dtype_, ProductPass::kForward, rows, n, k),
                  KernelKind::kGemm, 2.0 * rows * n * k,
                  (rows * (n + k) + rows / length * n * k) * element_});
  };
  const auto pass = [&](std::vector<Work>& to, double bytes, double rate) {
    to.push_back({TimeCause::kAttention, bytes / rate});
  };
  product(work.forward, length, width);
  pass(work.forward, scores * (2.0 * element_ + 2.0 * kFp32Bytes), memory_.add);
  product(work.forward, width, length);
  for (int i = 0; i < 2; ++i) {  // of both operands of each product
    product(work.backward_input, length, width);
    product(work.backward_input, width, length);
  }
  pass(work.backward_input, scores * (element_ + 3.0 * kFp32Bytes), memory_.add);
  if (element_ == kFp32Bytes) return;
  pass(work.forward, scores * 2.0 * (element_ + kFp32Bytes), memory_.copy);
  pass(work.backward_input, scores * 2.0 * (element_ + kFp32Bytes), memory_.copy);
}

void WorkCounter::add_fused_attention(UnitWork& work) const {
  const AttentionRate rate = rates_.attention_of(dtype_, config_.data.seq_len, head_dim(held_));
  const double flops =
      2.0 * static_cast<double>(config_.data.seq_len) * static_cast<double>(query_width(held_)) * tokens_;
  // Queries, keys, values and the output; backward those, the output's gradient and three gradients.
  const double bytes = moved(static_cast<double>(2 * (query_width(held_) + kv_width(held_))), tokens_);
  work.forward.push_back({TimeCause::kAttention, flops / rate.forward, KernelKind::kAttention, flops, bytes});
  work.backward_input.push_back(
      {TimeCause::kAttention, 2.0 * flops / rate.backward, KernelKind::kAttention, 2.0 * flops, 2.0 * bytes});
}

/// Eager attention rotates queries and keys by several passes in fp32.
void WorkCounter::add_attention(UnitWork& work) const {
  const bool eager = held_.attention == AttentionKind::kEager;
  eager ? add_eager_attention(work) : add_fused_attention(work);
  if (!family_.rotates) return;
  constexpr double kEagerPasses = 6.0;
  const double features = static_cast<double>(2 * (query_width(held_) + kv_width(held_)));
  const Work rotation =
      eager ? pass_of(KernelKind::kOther, kEagerPasses * moved(features, tokens_), memory_.add)
            : pass_of(KernelKind::kRope, moved(features, tokens_), memory_.add);
  work.forward.push_back(rotation);
  work.backward_input.push_back(rotation);
}

/// A gate doubles what the activation reads: features of the layer before it, of which `inner` are made.
void WorkCounter::add_activation(UnitWork& work, double inner) const {
  const auto out = static_cast<double>(held_.d_ff);
  work.forward.push_back(pass_of(KernelKind::kActivation, moved(inner + out, tokens_), memory_.activation));
  work.backward_input.push_back(
      pass_of(KernelKind::kActivation, moved(2.0 * inner + out, tokens_), memory_.activation_backward));
}

/// Forward a norm reads and writes a row, and with the sum before it twice as much. Backward it reads the
/// input, its gradient and that of the sum, and writes one.
void WorkCounter::add_norms(UnitWork& work, const UnitSpec& unit) const {
  bool first = true;
  for (const ParamSpec& param : unit.params) {
    if (param.shape.size() != 1 || !param.name.ends_with(".weight")) continue;
    const auto width = static_cast<double>(param.shape.front());
    work.forward.push_back(
        pass_of(KernelKind::kNorm, moved((first ? 2.0 : 4.0) * width, rows_), memory_.norm));
    work.backward_input.push_back(
        pass_of(KernelKind::kNorm, moved(4.0 * width, rows_), memory_.norm_backward));
    first = false;
  }
}

/// `last_product`: the place of the block's last product forward, kNone where the unit ends before it.
void WorkCounter::add_again(UnitWork& work, const UnitSpec& unit, int64_t layer, size_t last_product) const {
  const Recompute how = config_.memory.recompute;
  if (layer % config_.memory.recompute_every != 0 || how == Recompute::kNone) return;
  const bool whole = computes_blocks_again(how);
  const bool is_read = (family_.drops && held_.dropout > 0.0) || reads_last_product(unit);
  for (size_t i = 0; i < work.forward.size(); ++i) {
    const Work& one = work.forward[i];
    const bool kept = one.cause == TimeCause::kAttention && how == Recompute::kAllButAttention;
    const bool cheap = one.cause == TimeCause::kMemory;
    // Nothing reads the output of the block's last product, unless dropout or the gradient of a length does.
    const bool unread = i == last_product && family_.attends && !is_read;
    if (cheap || (whole && !kept && !unread)) work.again.push_back(one);
  }
  double seconds = 0.0;
  for (const Work& one : work.again) seconds += one.seconds;
  work.backward_input.insert(work.backward_input.begin(), {TimeCause::kAgain, seconds});
}

UnitWork WorkCounter::block(const UnitSpec& unit, int64_t layer) {
  UnitWork work;
  size_t last_product = kNone;
  add_norms(work, unit);
  const bool fp8 = multiplies_in_fp8(config_.precision.fp8, layer, config_.model.n_layers);
  for (const LinearWork& linear : linear_layers_of(unit, family_.in_out)) {
    if (linear.layer == BlockLayer::kAttentionOutput && family_.attends) add_attention(work);
    if (linear.layer == BlockLayer::kFeedForwardOut)
      add_activation(work, static_cast<double>(held_.d_ff) * (family_.rotates ? 2.0 : 1.0));
    add_linear(work, linear, fp8 && linear.layer.has_value());
    if (linear.layer == BlockLayer::kFeedForwardOut) last_product = work.forward.size() - 1;
  }
  add_lengths(work, unit);
  // The gradient of a bias sums the rows of that of the output.
  double biased = 0.0;
  for (const ParamSpec& param : unit.params) {
    if (is_bias_of_layer(param, unit)) biased += static_cast<double>(param.shape.front());
  }
  if (biased > 0.0)
    work.backward_weight.push_back({TimeCause::kMemory, moved(biased, tokens_) / memory_.add});
  add_again(work, unit, layer, last_product);
  return work;
}

/// A lookup reads and writes a row of each token; its gradient, of all words, is set to zero first.
void WorkCounter::add_words(UnitWork& work, const UnitSpec& root) const {
  const auto width = static_cast<double>(held_.d_model);
  double tables = 0.0, words = 0.0;
  for (const ParamSpec& param : root.params) {
    if (!is_matrix(param) || param.part.copy != 0) continue;
    tables += 1.0;
    if (!param.frozen) words += static_cast<double>(param.numel());
  }
  const double rows = moved(3.0 * tables * width, rows_);
  work.forward.push_back({TimeCause::kMemory, rows / memory_.copy});
  if (words > 0.0)
    work.backward_weight.push_back(
        {TimeCause::kMemory, rows / memory_.add + words * element_ / memory_.copy});
}

/// The loss reads logits and writes their gradient, twice where it scales them later. On a GPU all products
/// of the head are made with the loss.
void WorkCounter::add_head(UnitWork& work, const ParamSpec& weight) const {
  UnitWork head;
  add_linear(head, {.in = weight.shape[1], .out = weight.shape[0], .frozen = weight.frozen},
             config_.precision.fp8.head && config_.precision.fp8.recipe != Fp8::kOff);
  const auto words = static_cast<double>(weight.shape[0]);
  const auto pass = [&](double rate) {
    return pass_of(KernelKind::kLoss, moved(2.0 * words, tokens_), rate, TimeCause::kLoss);
  };
  head.forward.push_back(pass(memory_.loss));
  if (!on_gpu_) head.backward_input.push_back(pass(memory_.add));
  const auto append = [](std::vector<Work>& to, const std::vector<Work>& some) {
    to.insert(to.end(), some.begin(), some.end());
  };
  append(work.forward, head.forward);
  append(on_gpu_ ? work.forward : work.backward_input, head.backward_input);
  append(on_gpu_ ? work.forward : work.backward_weight, head.backward_weight);
}

/// The block that the unit is, or half of; -1: none.
int64_t number_of_block(const UnitSpec& unit, const std::vector<UnitSpec>& model) {
  std::string name = unit.name;
  for (const std::string half : {kAttentionHalf, kMlpHalf}) {
    if (name.ends_with(half)) name.erase(name.size() - half.size());
  }
  const auto found = std::ranges::find(model, name, &UnitSpec::name);
  const bool is_block = found != model.end() && name != kRootUnit && name != kHeadUnit;
  return is_block ? found - model.begin() - 1 : -1;
}

}  // namespace

std::string rate_dtype(Dtype dtype) {
  return dtype == Dtype::kFp32 ? "fp32" : "bf16";
}

std::vector<UnitWork> work_of_units(const std::vector<UnitSpec>& units, const Config& config,
                                    const ModelFacts& facts, const BatchPlan& batch, Device device,
                                    const Rates& rates) {
  if (reads_images(config.model.family)) {
    throw ConfigError(
        "[plan.unit_work] model.family={} reads images, whose convolutions no rates are known of; give a "
        "model of text, or measure with 'trireme bench'",
        name(config.model.family));
  }
  const ModelFamilyRecord& family = record_of(config.model.family);
  const ModelConfig model = complete(config.model, config.data.seq_len);
  WorkCounter counter(config, facts, batch, device, rates);
  std::vector<UnitWork> all;
  for (const UnitSpec& unit : units) {
    const int64_t layer = number_of_block(unit, facts.units);
    UnitWork work;
    if (layer >= 0) work = counter.block(unit, layer);
    if (layer < 0) counter.add_norms(work, unit);
    const bool looks_up = has_param(unit, family.embeddings(model).front().name, /*copies=*/false) &&
                          !unit.name.starts_with(kHeadUnit);
    if (looks_up) counter.add_words(work, unit);
    all.push_back(std::move(work));
  }
  if (const ParamSpec* const weight = head_weight(units, model)) counter.add_head(all.back(), *weight);
  return all;
}

double update_bytes(double elements, int64_t moments, int64_t compute_bytes) {
  const double state = 2.0 * static_cast<double>(moments) / 8.0;
  const double copy = compute_bytes == kFp32Bytes ? 0.0 : static_cast<double>(compute_bytes);
  return elements * (static_cast<double>(kFp32Bytes) * 3.0 + state + copy);
}

}  // namespace trireme::plan
