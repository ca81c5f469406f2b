#include "trireme/plan/peft.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/model_family.h"

namespace trireme::plan {
namespace {

using Json = nlohmann::json;

/// Throws unless a number of the file is that of a key of ours.
void check_number(const Json& config, const char* theirs, const char* ours, double value,
                  const std::string& path) {
  const auto found = config.find(theirs);
  if (found != config.end() && found->is_number() && found->get<double>() == value) return;
  throw ConfigError("[plan.peft] {} has {}={}, but {}={}; set {} to that of the file", path, theirs,
                    found == config.end() ? "nothing" : found->dump(), ours, value, ours);
}

/// Whether a value says that what it would switch on is off.
bool is_off(const Json& value) {
  return value.is_null() || value == false || value == "none" || (value.is_structured() && value.empty());
}

bool has_lengths(const Json& config) {
  const auto found = config.find("use_dora");
  return found != config.end() && !is_off(*found);
}

/// Throws unless the file is of adapters of the same kind.
void check_kind(const Json& config, const ModelConfig& model, const std::string& path) {
  const bool scales = has_lengths(config);
  if (scales == (model.adapter.kind == AdapterKind::kDora)) return;
  throw ConfigError("[plan.peft] {} has use_dora={}, but adapter.kind={}; set adapter.kind to {}", path,
                    scales, model.adapter.kind, scales ? AdapterKind::kDora : AdapterKind::kLora);
}

/// PiSSA and others take what the adapters begin with out of the weights.
bool changes_base(const Json& init) {
  return init.is_string() && init != "gaussian" && init != "orthogonal" && init != "eva";
}

}  // namespace

nlohmann::ordered_json to_peft(const ModelConfig& model) {
  const AdapterConfig& adapter = model.adapter;
  nlohmann::ordered_json targets = nlohmann::ordered_json::array();
  for (const std::string& layer : linear_layers(model))
    if (adapts(adapter, layer)) targets.push_back(layer);
  const bool has_name = !model.weights.empty();
  return {{"peft_type", "LORA"},
          {"task_type", "CAUSAL_LM"},
          {"base_model_name_or_path",
           has_name ? nlohmann::ordered_json(model.weights) : nlohmann::ordered_json()},
          {"r", adapter.rank},
          {"lora_alpha", adapter.alpha},
          {"lora_dropout", adapter.dropout},
          {"use_dora", adapter.kind == AdapterKind::kDora},
          {"target_modules", std::move(targets)},
          {"fan_in_fan_out", record_of(model.family).in_out},
          {"bias", "none"},
          {"inference_mode", true}};
}

ModelFacts adapter_facts(const ModelConfig& model, int64_t seq_len, const std::string& prefix) {
  ModelFacts facts = describe(model, seq_len);
  for (UnitSpec& unit : facts.units) {
    unit.params = unit.trained();
    for (ParamSpec& param : unit.params) param.name = prefix + param.name;
  }
  facts.params = trained_params(facts);
  return facts;
}

namespace {

/// "model.layers.0.self_attn.q_proj" and "q_proj" are one target: where not every block has it, its tensors
/// are missing.
std::string targets_of(const Json& config, const std::string& path) {
  const auto found = config.find("target_modules");
  if (found != config.end() && *found == "all-linear") return "all";
  const auto is_text = [](const Json& target) {
    return target.is_string() && target != "all" &&
           target.get_ref<const std::string&>().find(',') == std::string::npos;
  };
  if (found == config.end() || !found->is_array() || found->empty() || !std::ranges::all_of(*found, is_text))
    throw ConfigError(
        "[plan.peft] {} has target_modules={}, but only a list of names of layers is read; write it so", path,
        found == config.end() ? "nothing" : found->dump());
  std::set<std::string> names;
  for (const Json& target : *found) {
    const auto name = target.get<std::string>();
    names.insert(name.substr(name.rfind('.') + 1));
  }
  return fmt::format("{}", fmt::join(names, ","));
}

std::string number_in(const Json& config, const char* key, const std::string& path) {
  const auto found = config.find(key);
  if (found == config.end() || !found->is_number())
    throw ConfigError("[plan.peft] {} has {}={}, but it must be a number; correct it, or save it again", path,
                      key, found == config.end() ? "nothing" : found->dump());
  return found->dump();
}

}  // namespace

std::vector<std::string> keys_of_peft(const nlohmann::json& config, const std::string& path) {
  if (!config.is_object()) throw ConfigError("[plan.peft] {} is no JSON object; save it again", path);
  return {fmt::format("adapter.kind={}", has_lengths(config) ? AdapterKind::kDora : AdapterKind::kLora),
          "adapter.rank=" + number_in(config, "r", path),
          "adapter.alpha=" + number_in(config, "lora_alpha", path),
          "adapter.targets=" + targets_of(config, path)};
}

void check_peft(const nlohmann::json& config, const ModelConfig& model, const std::string& path) {
  static constexpr std::array kUnknown = {"use_rslora",       "bias",          "modules_to_save",
                                          "rank_pattern",     "alpha_pattern", "layers_pattern",
                                          "layer_replication"};
  const auto type = config.find("peft_type");
  if (!config.is_object() || type == config.end() || *type != "LORA")
    throw ConfigError("[plan.peft] {} describes no LoRA adapters: its peft_type is no LORA", path);
  check_number(config, "r", "adapter.rank", static_cast<double>(model.adapter.rank), path);
  check_number(config, "lora_alpha", "adapter.alpha", model.adapter.alpha, path);
  check_kind(config, model, path);
  if (const auto begun = config.find("init_lora_weights"); begun != config.end() && changes_base(*begun))
    throw ConfigError(
        "[plan.peft] {} has init_lora_weights={}, whose adapters stand on weights that PEFT has changed; "
        "merge "
        "it in PEFT and set model.weights to the result",
        path, begun->dump());
  for (const char* key : kUnknown) {
    const auto found = config.find(key);
    if (found == config.end() || is_off(*found)) continue;
    throw ConfigError(
        "[plan.peft] {} has {}={}, which adapters do not have here; merge it in PEFT and set model.weights "
        "to the result",
        path, key, found->dump());
  }
}

}  // namespace trireme::plan
