#pragma once
// Models as Hugging Face's transformers describes them: config.json as a model config and the other way
// round, and the names of tensors. Every key of config.json that says something of the architecture is
// understood, or refused by its name.
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "trireme/plan/config.h"

namespace trireme::plan {

/// The model of a config.json; max_seq_len is the longest sequence it knows. Takes what versions 4 and 5 of
/// transformers write. `without`: keys that the caller answers for. Throws ConfigError that names `path` and
/// every key that is missing, not known, or of a value that the model cannot have.
ModelConfig from_hugging_face(const nlohmann::json& config, const std::string& path,
                              const std::set<std::string>& without = {});

/// Keys of config.json for a complete `model` with weights of a dtype of transformers, such as "bfloat16".
/// Throws ConfigError when transformers has no such model.
nlohmann::ordered_json to_hugging_face(const ModelConfig& model, std::string_view dtype);

/// Our names for the tensors of a folder.
class HuggingFaceNames {
 public:
  /// `tensors`: all of the folder. Takes any `config` that is an object; of a family that is not known here
  /// names stay as they are.
  HuggingFaceNames(const nlohmann::json& config, const std::set<std::string>& tensors);

  /// Our name of a tensor; none: it is no parameter, but a constant that is computed here, or a head that is
  /// tied.
  std::optional<std::string> operator()(const std::string& tensor) const;
  /// The name of a tied head that is stored all the same.
  static constexpr const char* kHead = "lm_head.weight";
  /// The name of the parameter that the head is tied to; empty: the head is not tied.
  const std::string& tied_to() const { return tied_to_; }

 private:
  std::optional<ModelFamily> family_;
  std::string tied_to_;
  std::string prefix_;  ///< of names in a model that was saved without its head
};

}  // namespace trireme::plan
