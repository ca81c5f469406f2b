// From sources to one resolved config.
#include "trireme/plan/config.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <filesystem>
#include <optional>
#include <set>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/config_aliases.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/deepspeed.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/presets.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

constexpr std::string_view kVariablePrefix = "TRIREME__";
constexpr std::string_view kPresetKey = "model.preset";
constexpr size_t kMaxFileBytes = size_t{1} << 20;

using Assignments = std::vector<Assignment>;

// ---- the sources, each as assignments

/// The fix for a path that is really the name of a built-in model, else empty.
std::string preset_hint(const std::string& path) {
  const std::string stem = std::filesystem::path(path).stem().string();
  const std::string name = std::filesystem::path(path).filename().string();
  for (const Preset& preset : presets()) {
    if (preset.name == name || preset.name == stem) {
      return fmt::format(", or for the built-in model of that name use --model.preset={}", preset.name);
    }
  }
  return "";
}

std::string read_config_file(const std::string& path) {
  if (!std::filesystem::exists(path)) {
    throw ConfigError("[plan.config] there is no config file '{}'; correct the path{}", path,
                      preset_hint(path));
  }
  if (std::filesystem::is_directory(path)) {
    throw ConfigError("[plan.config] '{}' is a folder; give a YAML file in it", path);
  }
  return read_text_file(path, kMaxFileBytes);
}

Assignments from_yaml(const ConfigSources& sources) {
  TRIREME_CHECK(sources.path.empty() || sources.text.empty(),
                "[plan.config] both a path and a text were given; pass one of them");
  if (!sources.path.empty()) return read_yaml(read_config_file(sources.path), sources.path);
  return read_yaml(sources.text, "<text>");
}

/// "TRAIN__GLOBAL_BATCH" -> "train.global_batch".
std::string key_of_variable(std::string_view rest) {
  std::string key;
  for (size_t i = 0; i < rest.size(); ++i) {
    const bool separator = rest.substr(i, 2) == "__";
    key += separator ? '.' : static_cast<char>(std::tolower(static_cast<unsigned char>(rest[i])));
    if (separator) ++i;
  }
  return key;
}

Assignments from_environment(const Environment& environment) {
  Assignments assignments;
  for (const auto& [name, value] : environment.variables()) {
    if (name.starts_with(kVariablePrefix) && !value.empty()) {
      assignments.push_back(
          {key_of_variable(std::string_view(name).substr(kVariablePrefix.size())), value, name});
    }
  }
  return assignments;
}

Assignments from_overrides(const std::vector<std::string>& overrides) {
  Assignments assignments;
  for (const std::string& text : overrides) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw ConfigError("[plan.config] override '--{}' has no {}; write --section.key=value", text,
                        equals == 0 ? "key" : "value");
    }
    std::string key = text.substr(0, equals);
    std::replace(key.begin(), key.end(), '-', '_');
    assignments.push_back({key, text.substr(equals + 1), "--" + key});
  }
  return assignments;
}

Assignments all_in_our_keys(const Assignments& said) {
  Assignments all;
  for (const Assignment& assignment : said) {
    for (Assignment& ours : in_our_keys(assignment)) all.push_back(std::move(ours));
  }
  return all;
}

/// The assignments of each source, in rising precedence. The second is DeepSpeed's file, where there is one.
using Sources = std::array<Assignments, 4>;
constexpr size_t kDeepSpeedSource = 1;

Sources collect(const ConfigSources& sources, const Environment& environment) {
  return {all_in_our_keys(from_yaml(sources)),
          {},
          all_in_our_keys(from_environment(environment)),
          all_in_our_keys(from_overrides(sources.overrides))};
}

/// The last word on model.preset, and the source that has it; none: no preset is named.
struct NamedPreset {
  size_t source;
  Assignment said;
};

std::optional<NamedPreset> last_preset(const Sources& sources) {
  std::optional<NamedPreset> last;
  for (size_t source = 0; source < sources.size(); ++source) {
    for (const Assignment& assignment : sources[source]) {
      if (assignment.key == kPresetKey) last = {source, assignment};
    }
  }
  return last && !last->said.text.empty() ? last : std::nullopt;
}

/// Keys of the section model that a preset does not replace: they say what the images are, how training
/// regularizes, and what it begins with.
bool is_beside_shape(const std::string& key) {
  static const std::set<std::string> keys = {"model.weights",       "model.dropout",  "model.label_smoothing",
                                             "model.channels_last", "model.channels", "model.image_size",
                                             "model.classes"};
  return keys.contains(key);
}

void copy_value(const Field& from, const Field& to) {
  std::visit(
      [&to](const auto& source) {
        using Member = std::decay_t<decltype(source)>;
        const Member& target = std::get<Member>(to.value);
        if constexpr (std::is_same_v<Member, WordRef>)
          target.write(target.member, source.read(source.member));
        else
          *target = *source;
      },
      from.value);
}

// ---- the merge

class Resolver {
 public:
  Resolver() : table_(fields(resolved_.config)) {
    for (const Field& field : table_) resolved_.origins[field.key] = "default";
  }

  void apply(const Assignment& assignment) {
    if (const Policy* const row = labelled_row(assignment)) {
      apply({assignment.key, std::string(name(row->name)), assignment.origin});
      return apply({"parallel.sharding", std::string(name(row->sharding)), assignment.origin});
    }
    assign(find(assignment), assignment.text, assignment.origin);
    resolved_.origins[assignment.key] = assignment.origin;
  }

  /// In the order of the sources, with the preset before the keys of the one that names it.
  void merge(const Sources& sources) {
    const std::optional<NamedPreset> preset = last_preset(sources);
    for (size_t source = 0; source < sources.size(); ++source) {
      if (preset && preset->source == source) apply_preset(preset->said);
      for (const Assignment& assignment : sources[source]) {
        apply(assignment);
        last_source_[assignment.key] = source;
      }
    }
  }

  /// Values that depend on others where nobody said them, or on which a later source has the last word.
  void complete() {
    OptimConfig& optim = resolved_.config.optim;
    if (resolved_.origins.at("optim.weight_decay") == "default") {
      derive("optim.weight_decay", optim.weight_decay, usual_weight_decay(optim.name), "optim.name");
    }
    cut_warm_up();
    complete_model();
  }

  ResolvedConfig& resolved() { return resolved_; }

 private:
  void apply_preset(const Assignment& said) {
    apply(said);
    Config of_preset;
    of_preset.model = find_preset(said.text).model;
    const std::vector<Field> values = fields(of_preset);
    std::vector<std::string> replaced;
    for (size_t i = 0; i < table_.size(); ++i) {
      const Field& field = table_[i];
      if (!field.key.starts_with("model.") || field.key == kPresetKey) continue;
      std::string& origin = resolved_.origins.at(field.key);
      const bool was_said = origin != "default";
      if (was_said && is_beside_shape(field.key)) continue;
      if (was_said && value_of(field) != value_of(values[i]))
        replaced.push_back(plan::said(resolved_.origins, field.key, format_value(field)));
      copy_value(values[i], field);
      origin = "preset " + said.text;
    }
    if (replaced.empty()) return;
    resolved_.notes.push_back(fmt::format(
        "{} replaces {}", plan::said(resolved_.origins, said.key, said.text), join(replaced, ", ")));
  }

  /// A run that a later source than that of the warm-up has shortened ends its warm-up with its last step.
  void cut_warm_up() {
    const TrainConfig& train = resolved_.config.train;
    int64_t& warm_up = resolved_.config.optim.warmup_steps;
    const size_t said_length = std::max(source_of("train.steps"), source_of("train.epochs"));
    if (train.epochs > 0 || warm_up <= train.steps || said_length <= source_of("optim.warmup_steps")) return;
    resolved_.notes.push_back(fmt::format("{} is cut to {}",
                                          plan::said(resolved_.origins, "optim.warmup_steps", warm_up),
                                          plan::said(resolved_.origins, "train.steps", train.steps)));
    warm_up = train.steps;
    resolved_.origins["optim.warmup_steps"] = "derived: train.steps";
  }

  /// The number of the source with the last word on `key`; 0 also where none has one.
  size_t source_of(const std::string& key) const {
    const auto found = last_source_.find(key);
    return found == last_source_.end() ? 0 : found->second;
  }

  /// Fills the model's 0-means-default fields and says from what.
  void complete_model() {
    ModelConfig& model = resolved_.config.model;
    if (reads_images(model.family)) return complete_images();
    derive("data.kind", resolved_.config.data.kind, DataKind::kText, "model.family");
    if (model.n_kv_heads == 0) resolved_.origins["model.n_kv_heads"] = "derived: model.n_heads";
    if (model.d_ff == 0) resolved_.origins["model.d_ff"] = "derived: 4 * model.d_model";
    if (model.max_seq_len == 0) resolved_.origins["model.max_seq_len"] = "derived: data.seq_len";
    model = plan::complete(model, resolved_.config.data.seq_len);
  }

  void complete_images() {
    ModelConfig& model = resolved_.config.model;
    const ModelConfig whole = plan::complete(model, 1);
    derive("model.n_layers", model.n_layers, whole.n_layers, "model.depth");
    derive("model.d_model", model.d_model, whole.d_model, "model.width");
    derive("model.n_heads", model.n_heads, whole.n_heads, "model.family");
    derive("model.n_kv_heads", model.n_kv_heads, whole.n_kv_heads, "model.family");
    derive("model.d_ff", model.d_ff, whole.d_ff, "model.width");
    derive("model.vocab_size", model.vocab_size, whole.vocab_size, "model.classes");
    derive("model.max_seq_len", model.max_seq_len, whole.max_seq_len, "model.family");
    derive("model.tie_embeddings", model.tie_embeddings, whole.tie_embeddings, "model.family");
    derive("data.seq_len", resolved_.config.data.seq_len, int64_t{1}, "model.family");
    derive("data.kind", resolved_.config.data.kind, DataKind::kImages, "model.family");
    model = whole;
  }

  /// A field that follows from another. What somebody said is refused unless it is the same.
  template <typename Value>
  void derive(const std::string& key, Value& member, Value value, const char* from) {
    std::string& origin = resolved_.origins.at(key);
    const bool said_so = origin != "default" && !origin.starts_with("preset ");
    bool open = member == value;
    if constexpr (std::is_same_v<Value, DataKind>) open = open || member == DataKind::kAuto;
    if (said_so && !open) {
      throw ConfigError(
          "[plan.config] {}, but {}={} ({}), which implies {}; remove it or choose another model",
          said(resolved_.origins, key, member), from, format_value(find({from, {}, origin})),
          resolved_.origins.at(from), value);
    }
    if (!said_so || member != value) origin = fmt::format("derived: {}", from);
    member = value;
  }

  /// The row that parallel.policy names by its label, "fsdp:full_shard".
  static const Policy* labelled_row(const Assignment& assignment) {
    if (assignment.key != "parallel.policy" || assignment.text.find(':') == std::string::npos) return nullptr;
    const auto row = std::ranges::find(policies(), assignment.text, &Policy::label);
    return row == policies().end() ? nullptr : &*row;
  }

  const Field& find(const Assignment& assignment) const {
    for (const Field& field : table_) {
      if (field.key == assignment.key) return field;
    }
    throw ConfigError("[plan.config] {}: unknown key '{}'{}; correct or remove it", assignment.origin,
                      assignment.key, suggest_key(assignment.key));
  }

  ResolvedConfig resolved_;
  std::vector<Field> table_;  ///< points into resolved_
  std::map<std::string, size_t> last_source_;
};

ResolvedConfig resolve(const Sources& sources, bool tokenizes) {
  Resolver resolver;
  resolver.merge(sources);
  resolver.complete();
  check_config(resolver.resolved().config, resolver.resolved().origins, tokenizes);
  return resolver.resolved();
}

}  // namespace

ResolvedConfig load(const ConfigSources& sources, const Environment& environment) {
  return resolve(collect(sources, environment), sources.tokenizes);
}

ResolvedConfig load(const ConfigSources& sources, const DeepSpeedFile& file, const Environment& environment) {
  Sources all = collect(sources, environment);
  Resolver others;
  others.merge(all);
  const DeepSpeedConfig theirs = read_deepspeed(file, others.resolved().config);
  for (const DeepSpeedSetting& setting : theirs.settings)
    all[kDeepSpeedSource].push_back({setting.key, setting.value, setting.why});
  ResolvedConfig resolved = resolve(all, sources.tokenizes);
  resolved.notes.insert(resolved.notes.end(), theirs.notes.begin(), theirs.notes.end());
  return resolved;
}

}  // namespace trireme::plan
