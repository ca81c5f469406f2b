#include "trireme/plan/hugging_face.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {
namespace {

using Json = nlohmann::json;
using OrderedJson = nlohmann::ordered_json;

/// Keys that every config of transformers may have and that change no number of a forward pass: ids of
/// tokens, how weights were first drawn, how text is generated, what a pass returns besides, where a file is
/// from.
constexpr auto kOfNoConsequence = std::to_array<std::string_view>({"architectures",
                                                                   "bad_words_ids",
                                                                   "begin_suppress_tokens",
                                                                   "bos_token_id",
                                                                   "chunk_size_feed_forward",
                                                                   "decoder_start_token_id",
                                                                   "diversity_penalty",
                                                                   "do_sample",
                                                                   "dtype",
                                                                   "early_stopping",
                                                                   "encoder_no_repeat_ngram_size",
                                                                   "eos_token_id",
                                                                   "exponential_decay_length_penalty",
                                                                   "finetuning_task",
                                                                   "forced_bos_token_id",
                                                                   "forced_eos_token_id",
                                                                   "gradient_checkpointing",
                                                                   "id2label",
                                                                   "initializer_range",
                                                                   "label2id",
                                                                   "length_penalty",
                                                                   "max_length",
                                                                   "min_length",
                                                                   "model_type",
                                                                   "no_repeat_ngram_size",
                                                                   "num_beam_groups",
                                                                   "num_beams",
                                                                   "num_return_sequences",
                                                                   "output_attentions",
                                                                   "output_hidden_states",
                                                                   "output_scores",
                                                                   "pad_token_id",
                                                                   "prefix",
                                                                   "pretraining_tp",
                                                                   "problem_type",
                                                                   "remove_invalid_values",
                                                                   "reorder_and_upcast_attn",
                                                                   "repetition_penalty",
                                                                   "return_dict",
                                                                   "return_dict_in_generate",
                                                                   "sep_token_id",
                                                                   "summary_activation",
                                                                   "summary_first_dropout",
                                                                   "summary_proj_to_labels",
                                                                   "summary_type",
                                                                   "summary_use_proj",
                                                                   "suppress_tokens",
                                                                   "task_specific_params",
                                                                   "temperature",
                                                                   "tf_legacy_loss",
                                                                   "tokenizer_class",
                                                                   "top_k",
                                                                   "top_p",
                                                                   "torch_dtype",
                                                                   "torchscript",
                                                                   "transformers_version",
                                                                   "typical_p",
                                                                   "use_bfloat16",
                                                                   "use_cache"});

std::string shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  constexpr size_t kLongest = 60;
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

/// The keys of an object, each asked for by whoever knows what it means. A key whose value is null is not
/// there. What is wrong is collected, so that one message says all of it.
class Keys {
 public:
  /// `without`: keys whose values are not looked at.
  Keys(const Json& object, std::string prefix, const std::set<std::string>& without,
       std::vector<std::string>& problems)
      : object_(object), prefix_(std::move(prefix)), without_(without), problems_(problems) {}

  const Json* find(const std::string& key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  int64_t count(const std::string& key, std::optional<int64_t> otherwise = {}) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise ? *otherwise : missing<int64_t>(key, 1);
    const bool fits = !value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t{1} << 62;
    if (value->is_number_integer() && fits && value->get<int64_t>() > 0) return value->get<int64_t>();
    return wrong<int64_t>(key, *value, "must be a positive integer of at most 62 bits", 1);
  }
  double number(const std::string& key, std::optional<double> otherwise = {}) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise ? *otherwise : missing<double>(key, 1.0);
    if (value->is_number() && std::isfinite(value->get<double>())) return value->get<double>();
    return wrong<double>(key, *value, "must be a number", 1.0);
  }
  bool flag(const std::string& key, bool otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    return value->is_boolean() ? value->get<bool>()
                               : wrong<bool>(key, *value, "must be true or false", false);
  }
  /// A key that may be left out, or say what the model does anyway.
  template <typename Value>
  void must_be(const std::string& key, const std::vector<Value>& possible) {
    const Json* value = find(key);
    if (value == nullptr || without_.contains(prefix_ + key)) return;
    for (const Value& one : possible) {
      if (*value == Json(one)) return;
    }
    std::vector<std::string> words;
    for (const Value& one : possible) words.push_back(shown(Json(one)));
    wrong<int>(key, *value, fmt::format("can only be {}", join(words, " or ")), 0);
  }

  template <typename Value>
  Value wrong(const std::string& key, const Json& value, const std::string& rule, Value instead) {
    problems_.push_back(fmt::format("{}{}={} {}", prefix_, key, shown(value), rule));
    return instead;
  }
  template <typename Value>
  Value missing(const std::string& key, Value instead) {
    problems_.push_back(fmt::format("{}{} is missing", prefix_, key));
    return instead;
  }

  /// Keys that nobody has asked for.
  void refuse_others() {
    for (const auto& [key, value] : object_.items()) {
      const bool inert = value.is_null() || key.starts_with('_');
      if (known_.contains(key) || without_.contains(prefix_ + key) || inert) continue;
      problems_.push_back(fmt::format("{}{}={} is not supported", prefix_, key, shown(value)));
    }
  }
  void know(std::string_view key) { known_.emplace(key); }

 private:
  const Json& object_;
  std::string prefix_;
  const std::set<std::string>& without_;
  std::vector<std::string>& problems_;
  std::set<std::string> known_;
};

/// "rope_parameters" of version 5, which has the base as well, or "rope_scaling" of version 4. Where both say
/// something, transformers takes all of "rope_scaling" and nothing of the other
/// (RotaryEmbeddingConfigMixin.convert_rope_params_to_dict).
void read_rope(Keys& keys, ModelConfig& model, const std::set<std::string>& without,
               std::vector<std::string>& problems) {
  const Json* old_base = keys.find("rope_theta");
  model.rope_theta = old_base != nullptr ? keys.number("rope_theta") : 10000.0;
  const Json* scaling = keys.find("rope_scaling");
  const Json* parameters = keys.find("rope_parameters");
  const bool has_scaling = scaling != nullptr && !(scaling->is_object() && scaling->empty());
  const std::string name = has_scaling ? "rope_scaling" : "rope_parameters";
  const Json* object = has_scaling ? scaling : parameters;
  if (object == nullptr) return;
  if (!object->is_object()) {
    keys.wrong<int>(name, *object, "must be an object", 0);
    return;
  }
  Keys rope(*object, name + ".", without, problems);
  model.rope_theta = rope.number("rope_theta", model.rope_theta);
  const Json* type = rope.find("rope_type");
  const Json* old_type = rope.find("type");
  const Json word = type != nullptr ? *type : old_type != nullptr ? *old_type : Json("default");
  rope.must_be<double>("partial_rotary_factor", {1.0});
  if (word == "llama3") {
    model.rope_scaling = RopeScaling::kLlama3;
    model.rope_factor = rope.number("factor");
    model.rope_low_freq_factor = rope.number("low_freq_factor");
    model.rope_high_freq_factor = rope.number("high_freq_factor");
    model.rope_original_len = rope.count("original_max_position_embeddings");
  } else if (word != "default") {
    rope.wrong<int>(type != nullptr ? "rope_type" : "type", word, "can only be \"default\" or \"llama3\"", 0);
    return;  // its other keys are of that type
  }
  rope.refuse_others();
}

ModelConfig read_llama(Keys& keys, const std::set<std::string>& without, std::vector<std::string>& problems) {
  ModelConfig model{.family = ModelFamily::kLlama};
  model.n_layers = keys.count("num_hidden_layers");
  model.d_model = keys.count("hidden_size");
  model.n_heads = keys.count("num_attention_heads");
  model.n_kv_heads = keys.count("num_key_value_heads", model.n_heads);
  model.d_ff = keys.count("intermediate_size");
  model.vocab_size = keys.count("vocab_size");
  model.max_seq_len = keys.count("max_position_embeddings", 2048);
  model.norm_eps = keys.number("rms_norm_eps", 1e-6);
  model.tie_embeddings = keys.flag("tie_word_embeddings", false);
  read_rope(keys, model, without, problems);
  keys.must_be<std::string>("hidden_act", {"silu", "swish"});
  keys.must_be<bool>("attention_bias", {false});
  keys.must_be<bool>("mlp_bias", {false});
  keys.must_be<double>("attention_dropout", {0.0});
  keys.must_be<double>("partial_rotary_factor", {1.0});
  const int64_t of_width = model.d_model / std::max<int64_t>(1, model.n_heads);
  if (const int64_t size = keys.count("head_dim", of_width); size != of_width) model.head_dim = size;
  return model;
}

ModelConfig read_gpt2(Keys& keys, const std::set<std::string>& without, std::vector<std::string>& problems) {
  ModelConfig model{.family = ModelFamily::kGpt2};
  model.n_layers = keys.count("n_layer");
  model.d_model = keys.count("n_embd");
  model.n_heads = keys.count("n_head");
  model.n_kv_heads = model.n_heads;
  constexpr int64_t kLargest = int64_t{1} << 40;  // four times that is a number, too
  model.d_ff = keys.count("n_inner", 4 * std::min(model.d_model, kLargest));
  model.vocab_size = keys.count("vocab_size");
  model.max_seq_len = keys.count("n_positions");
  if (const Json* context = keys.find("n_ctx"); context != nullptr && *context != model.max_seq_len)
    keys.wrong<int>("n_ctx", *context, "can only be n_positions", 0);
  model.norm_eps = keys.number("layer_norm_epsilon", 1e-5);
  model.tie_embeddings = keys.flag("tie_word_embeddings", true);
  model.dropout = keys.number("resid_pdrop", 0.1);
  for (const char* key : {"attn_pdrop", "embd_pdrop"}) {
    if (const double other = keys.number(key, 0.1); other != model.dropout && !without.contains(key))
      problems.push_back(fmt::format("{}={} and resid_pdrop={} differ, but there is one model.dropout", key,
                                     other, model.dropout));
  }
  keys.must_be<std::string>("activation_function", {"gelu_new", "gelu_pytorch_tanh"});
  keys.must_be<bool>("scale_attn_weights", {true});
  keys.must_be<bool>("scale_attn_by_inverse_layer_idx", {false});
  return model;
}

struct Family {
  ModelFamily family;
  const char* type;   ///< "model_type"
  const char* model;  ///< architectures: this, or that of the body alone
  const char* body;
  ModelConfig (*read)(Keys&, const std::set<std::string>& without, std::vector<std::string>& problems);
};
constexpr Family kFamilies[] = {{ModelFamily::kLlama, "llama", "LlamaForCausalLM", "LlamaModel", read_llama},
                                {ModelFamily::kGpt2, "gpt2", "GPT2LMHeadModel", "GPT2Model", read_gpt2}};

const Family* family_of(const Json& config) {
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  if (!config.is_object() || type == config.end()) return nullptr;
  for (const Family& family : kFamilies) {
    if (*type == family.type) return &family;
  }
  return nullptr;
}

const Family& known_family(const Json& config, const std::string& path) {
  if (const Family* family = family_of(config)) return *family;
  const Json type = config.is_object() ? config.value("model_type", Json()) : Json();
  throw ConfigError("[plan.hugging_face] {}: model_type={} is not supported; it can be \"llama\" or \"gpt2\"",
                    path, shown(type));
}

void check_architectures(Keys& keys, const Family& family) {
  const Json* names = keys.find("architectures");
  if (names == nullptr || (names->is_array() && names->empty())) return;
  if (names->is_array() && names->size() == 1 &&
      (names->at(0) == family.model || names->at(0) == family.body))
    return;
  keys.wrong<int>("architectures", *names,
                  fmt::format("can only be \"{}\" or \"{}\"", family.model, family.body), 0);
}

/// Ranges and rules of our own keys.
void check_as_config(const ModelConfig& model, const std::string& path) {
  Config config;
  config.model = model;
  config.data.seq_len = 1;
  try {
    load({.path = {}, .text = to_yaml({config, {}}), .overrides = {}}, Environment());
  } catch (const ConfigError& error) {
    throw ConfigError("[plan.hugging_face] {} does not give a valid model: {}", path, error.what());
  }
}

void put_rope(OrderedJson& json, const ModelConfig& model) {
  json["rope_theta"] = model.rope_theta;
  json["rope_scaling"] = nullptr;
  if (model.rope_scaling != RopeScaling::kLlama3) return;
  json["rope_scaling"] = {{"rope_type", "llama3"},
                          {"factor", model.rope_factor},
                          {"low_freq_factor", model.rope_low_freq_factor},
                          {"high_freq_factor", model.rope_high_freq_factor},
                          {"original_max_position_embeddings", model.rope_original_len}};
}

void put_llama(OrderedJson& json, const ModelConfig& model) {
  json["vocab_size"] = model.vocab_size;
  json["hidden_size"] = model.d_model;
  json["intermediate_size"] = model.d_ff;
  json["num_hidden_layers"] = model.n_layers;
  json["num_attention_heads"] = model.n_heads;
  json["num_key_value_heads"] = model.n_kv_heads;
  json["head_dim"] = head_dim(model);
  json["hidden_act"] = "silu";
  json["max_position_embeddings"] = model.max_seq_len;
  json["rms_norm_eps"] = model.norm_eps;
  put_rope(json, model);
  json["attention_bias"] = false;
  json["attention_dropout"] = 0.0;
  json["mlp_bias"] = false;
}

void put_gpt2(OrderedJson& json, const ModelConfig& model) {
  json["vocab_size"] = model.vocab_size;
  json["n_positions"] = model.max_seq_len;
  json["n_embd"] = model.d_model;
  json["n_layer"] = model.n_layers;
  json["n_head"] = model.n_heads;
  json["n_inner"] = model.d_ff;
  json["activation_function"] = "gelu_new";
  json["layer_norm_epsilon"] = model.norm_eps;
  json["resid_pdrop"] = model.dropout;
  json["embd_pdrop"] = model.dropout;
  json["attn_pdrop"] = model.dropout;
  json["scale_attn_weights"] = true;
  json["scale_attn_by_inverse_layer_idx"] = false;
}

}  // namespace

ModelConfig from_hugging_face(const Json& config, const std::string& path,
                              const std::set<std::string>& without) {
  const Family& family = known_family(config, path);
  std::vector<std::string> problems;
  Keys keys(config, "", without, problems);
  for (const std::string_view key : kOfNoConsequence) keys.know(key);
  check_architectures(keys, family);
  for (const char* key : {"is_decoder", "is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"})
    keys.find(key);
  keys.must_be<bool>("is_encoder_decoder", {false});
  keys.must_be<bool>("add_cross_attention", {false});
  keys.must_be<Json>("pruned_heads", {Json::object()});
  const ModelConfig model = family.read(keys, without, problems);
  keys.refuse_others();
  if (!problems.empty()) {
    throw ConfigError(
        "[plan.hugging_face] {} describes an unsupported variant of {}: {}; 'trireme ckpt import-hf --ignore "
        "KEY' ignores a key",
        path, family.type, join(problems, "; "));
  }
  check_as_config(model, path);
  return model;
}

OrderedJson to_hugging_face(const ModelConfig& model, std::string_view dtype) {
  for (const Family& family : kFamilies) {
    if (family.family != model.family) continue;
    OrderedJson json{{"architectures", {family.model}}, {"model_type", family.type}};
    model.family == ModelFamily::kLlama ? put_llama(json, model) : put_gpt2(json, model);
    json["tie_word_embeddings"] = model.tie_embeddings;
    json["torch_dtype"] = dtype;
    json["use_cache"] = true;
    return json;
  }
  throw ConfigError(
      "[plan.hugging_face] transformers has no model of family {}; gpt2 and llama can be exported",
      name(model.family));
}

HuggingFaceNames::HuggingFaceNames(const Json& config, const std::set<std::string>& tensors) {
  const Family* family = family_of(config);
  if (family == nullptr) return;
  family_ = family->family;
  const std::string body = *family_ == ModelFamily::kGpt2 ? "transformer." : "model.";
  const std::string embedding = *family_ == ModelFamily::kGpt2 ? "wte.weight" : "embed_tokens.weight";
  if (tensors.contains(embedding)) prefix_ = body;
  const auto tied = config.find("tie_word_embeddings");
  const bool is_said = tied != config.end() && tied->is_boolean();
  if (is_said ? tied->get<bool>() : *family_ == ModelFamily::kGpt2) tied_to_ = body + embedding;
}

std::optional<std::string> HuggingFaceNames::operator()(const std::string& tensor) const {
  if (!family_) return tensor;
  if (tensor == kHead) return tied_to_.empty() ? std::optional(tensor) : std::nullopt;
  const bool constant = *family_ == ModelFamily::kGpt2
                            ? tensor.ends_with(".attn.bias") || tensor.ends_with(".attn.masked_bias")
                            : tensor.ends_with(".rotary_emb.inv_freq");
  if (constant) return std::nullopt;
  return prefix_ + tensor;
}

}  // namespace trireme::plan
