#include "trireme/plan/adapter.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "trireme/base/error.h"
#include "trireme/base/nf4_format.h"
#include "trireme/base/text.h"
#include "trireme/plan/model_family.h"

namespace trireme::plan {
namespace {

constexpr const char* kAllLayers = "all";
constexpr std::string_view kWeight = ".weight";

/// "model.layers.0.mlp.up_proj.weight" -> "model.layers.0.mlp.up_proj"; of another parameter nothing.
std::string module_of(const ParamSpec& param) {
  if (!param.layer || !param.name.ends_with(kWeight)) return {};
  return param.name.substr(0, param.name.size() - kWeight.size());
}

std::string last_word(const std::string& path) {
  return path.substr(path.rfind('.') + 1);
}

/// A, normally distributed with the variance of the uniform values that PEFT begins with, B, zeros, and what
/// is added to the lengths of rows, zeros.
struct AdapterParams {
  ParamSpec first, second, magnitude;
};
AdapterParams adapter_of(const ParamSpec& weight, const ModelConfig& model) {
  const bool in_out = record_of(model.family).in_out;
  const int64_t in = weight.shape[in_out ? 0 : 1], out = weight.shape[in_out ? 1 : 0],
                rank = model.adapter.rank;
  const AdapterNames names = adapter_names(weight.name);
  ParamSpec first{.name = names.first,
                  .shape = {rank, in},
                  .initial = {.deviation = 1.0 / std::sqrt(3.0 * static_cast<double>(in))}};
  ParamSpec second{.name = names.second, .shape = {out, rank}, .packed = weight.packed};
  return {std::move(first),
          std::move(second),
          {.name = names.magnitude, .shape = {out}, .packed = weight.packed}};
}

/// Frozen parameters, and behind them the adapters: all A, then all B, then lengths.
std::vector<ParamSpec> adapted(std::vector<ParamSpec> params, const ModelConfig& model) {
  std::vector<ParamSpec> firsts, seconds, magnitudes;
  for (ParamSpec& param : params) {
    param.frozen = true;
    const std::string module = module_of(param);
    if (module.empty() || !adapts(model.adapter, last_word(module))) continue;
    AdapterParams adapter = adapter_of(param, model);
    firsts.push_back(std::move(adapter.first));
    seconds.push_back(std::move(adapter.second));
    if (model.adapter.kind == AdapterKind::kDora) magnitudes.push_back(std::move(adapter.magnitude));
  }
  params.insert(params.end(), firsts.begin(), firsts.end());
  params.insert(params.end(), seconds.begin(), seconds.end());
  params.insert(params.end(), magnitudes.begin(), magnitudes.end());
  return params;
}

void adapt_block(UnitSpec& block, const ModelConfig& model) {
  const auto middle =
      block.params.begin() + static_cast<std::ptrdiff_t>(record_of(model.family).attention_params);
  std::vector<ParamSpec> attention = adapted({block.params.begin(), middle}, model);
  const std::vector<ParamSpec> rest = adapted({middle, block.params.end()}, model);
  attention.insert(attention.end(), rest.begin(), rest.end());
  block.params = std::move(attention);
}

}  // namespace

AdapterNames adapter_names(const std::string& weight) {
  if (!weight.ends_with(kWeight)) return {};
  const std::string module = weight.substr(0, weight.size() - kWeight.size());
  return {module + kAdapterIn + std::string(kWeight), module + kAdapterOut + std::string(kWeight),
          module + kMagnitude};
}

ModelConfig without_adapters(ModelConfig model) {
  model.adapter = {};
  return model;
}

bool adapts(const AdapterConfig& adapter, std::string_view module) {
  if (adapter.kind == AdapterKind::kNone) return false;
  const std::vector<std::string> targets = split(adapter.targets, ',');
  return adapter.targets == kAllLayers || std::ranges::find(targets, module) != targets.end();
}

bool is_of_adapter(std::string_view parameter) {
  return is_magnitude(parameter) || parameter.ends_with(std::string(kAdapterIn) + std::string(kWeight)) ||
         parameter.ends_with(std::string(kAdapterOut) + std::string(kWeight));
}

bool has_adapter(const UnitSpec& unit, const ParamSpec& weight) {
  const std::string module = module_of(weight);
  if (module.empty()) return false;
  const std::string first = module + kAdapterIn + std::string(kWeight);
  return std::ranges::find(unit.params, first, &ParamSpec::name) != unit.params.end();
}

double scale_of(const AdapterConfig& adapter) {
  return adapter.alpha / static_cast<double>(adapter.rank);
}

bool draws_in_training(const ModelConfig& model) {
  return model.dropout > 0.0 || model.adapter.dropout > 0.0;
}

bool reads_last_product(const UnitSpec& block) {
  return std::ranges::any_of(block.params, [&](const ParamSpec& weight) {
    const std::string magnitude = module_of(weight) + kMagnitude;
    return weight.layer == BlockLayer::kFeedForwardOut &&
           std::ranges::find(block.params, magnitude, &ParamSpec::name) != block.params.end();
  });
}

namespace {

struct AdaptedLayer {
  BlockLayer layer;
  int64_t in, out;
};

/// The layers with adapters in a block of the model, or in a half of it.
std::vector<AdaptedLayer> adapted_layers(const ModelConfig& model, BlockPart part) {
  const ModelFamilyRecord& family = record_of(model.family);
  const std::vector<ParamSpec> params = family.block(model, 0).params;
  std::vector<AdaptedLayer> layers;
  for (size_t i = 0; i < params.size(); ++i) {
    const bool attends = i < family.attention_params;
    if (part != BlockPart::kWhole && attends != (part == BlockPart::kAttention)) continue;
    const std::string module = module_of(params[i]);
    if (module.empty() || !adapts(model.adapter, last_word(module))) continue;
    layers.push_back({.layer = *params[i].layer,
                      .in = params[i].shape[family.in_out ? 0 : 1],
                      .out = params[i].shape[family.in_out ? 1 : 0]});
  }
  return layers;
}

}  // namespace

int64_t adapter_bytes(const ModelConfig& model, BlockPart part, int64_t element_bytes) {
  const bool drops = model.adapter.dropout > 0.0, scales = model.adapter.kind == AdapterKind::kDora;
  if (!drops && !scales) return 0;
  int64_t bytes = 0;
  for (const AdaptedLayer& layer : adapted_layers(model, part))
    bytes += (drops ? layer.in * (element_bytes + 1) : 0) + (scales ? layer.out * element_bytes : 0);
  return bytes;
}

int64_t read_bytes(const ModelConfig& model, BlockPart part, int64_t element_bytes) {
  if (model.adapter.dropout > 0.0) return 0;
  std::map<BlockLayer, int64_t> inputs;
  for (const AdaptedLayer& layer : adapted_layers(model, part))
    if (layer.layer != BlockLayer::kAttentionOutput) inputs[layer.layer] = layer.in * element_bytes;
  int64_t bytes = 0;
  for (const auto& [layer, of_layer] : inputs) bytes += of_layer;
  return bytes;
}

std::vector<std::string> linear_layers(const ModelConfig& model) {
  std::vector<std::string> names;
  for (const ParamSpec& param : record_of(model.family).block(model, 0).params) {
    const std::string name = last_word(module_of(param));
    if (!name.empty() && std::ranges::find(names, name) == names.end()) names.push_back(name);
  }
  return names;
}

void check_targets(const ModelConfig& model, const std::string& said) {
  const std::vector<std::string> layers = linear_layers(model);
  if (model.adapter.targets == kAllLayers) return;
  for (const std::string& target : split(model.adapter.targets, ',')) {
    if (std::ranges::find(layers, target) != layers.end()) continue;
    throw ConfigError(
        "[plan.adapter] {} names '{}', but the linear layers of a block of {} are {}; name some of these, "
        "separated by commas, or write all",
        said, target, model.family, join(layers, ", "));
  }
}

void adapt(std::vector<UnitSpec>& units, const ModelConfig& model) {
  if (model.adapter.kind == AdapterKind::kNone) return;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    const bool is_block = unit > 0 && units[unit].name != kHeadUnit;
    if (is_block) adapt_block(units[unit], model);
    for (ParamSpec& param : units[unit].params) {
      param.frozen = !is_of_adapter(param.name);
      param.nf4 = is_block && param.frozen && param.layer && model.adapter.base == AdapterBase::kNf4;
    }
  }
}

size_t attention_params(const UnitSpec& block, const ModelConfig& model) {
  const size_t own = record_of(model.family).attention_params;
  const auto behind =
      std::ranges::find_if_not(block.params.begin() + static_cast<std::ptrdiff_t>(own), block.params.end(),
                               [](const ParamSpec& param) { return is_of_adapter(param.name); });
  return static_cast<size_t>(behind - block.params.begin());
}

int64_t decoded_bytes(const ModelFacts& facts, int64_t element_bytes) {
  int64_t most = 0;
  for (const UnitSpec& unit : facts.units) {
    std::map<BlockLayer, int64_t> elements;
    for (const ParamSpec& param : unit.params) {
      if (param.nf4) elements[*param.layer] += param.numel();
    }
    for (const auto& [layer, count] : elements) most = std::max(most, count * element_bytes);
  }
  return most;
}

int64_t trained_params(const ModelFacts& facts) {
  int64_t sum = 0;
  for (const UnitSpec& unit : facts.units) {
    for (const ParamSpec& param : unit.trained()) sum += param.numel();
  }
  return sum;
}

}  // namespace trireme::plan
