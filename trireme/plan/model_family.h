#pragma once
// The families of models, one record each: parameters with their shapes and initial values, bytes kept for
// backward, requirements on a config. A new family of text is an enumerator in choices.h, its record in a
// file beside gpt2_family.cpp, its module and its line in the table of nn/language_model.cpp, and a preset.
// Families that read images are described by plan/vision_model.h; their records say what configs ask of all
// models and have none of the functions but check.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

/// Features of a token, over all linear layers of a part of a block.
struct LinearFeatures {
  int64_t taken = 0;   ///< an input of several layers counts once
  int64_t made = 0;    ///< outputs
  int64_t biased = 0;  ///< outputs of layers that have a bias
};
struct BlockLinears {
  LinearFeatures attention;  ///< 0: a block is one piece
  LinearFeatures rest;
};

/// The functions take a complete model (plan::complete).
struct ModelFamilyRecord {
  ModelFamily family;
  /// Blocks have attention heads, and every layer multiplies with keys and values: 6 T heads head_dim more
  /// FLOPs a token.
  bool attends;
  bool drops;            ///< model.dropout has an effect
  bool in_out = false;   ///< matrices of linear layers are (in, out)
  bool rotates = false;  ///< positions are rotary: the keys model.rope_* have an effect

  /// The parameters that tokens pass before the first block.
  std::vector<ParamSpec> (*embeddings)(const ModelConfig& model);
  /// The block's module path and its parameters, in flat-buffer order.
  UnitSpec (*block)(const ModelConfig& model, int64_t layer);
  /// The first so many parameters of a block are those of its attention, which adds to its input before the
  /// rest does; 0: a block is one piece.
  size_t attention_params;
  /// The parameters between the last block and the head.
  std::vector<ParamSpec> (*final_norm)(const ModelConfig& model);

  BlockLinears (*linears)(const ModelConfig& model);
  /// Bytes of one layer that one token keeps for backward, with `element_bytes` an element and fused
  /// attention (its output and an fp32 log-sum-exp a head): as many elements as linears() take and make, and
  /// what attention and dropout keep beside.
  int64_t (*saved_bytes)(const ModelConfig& model, int64_t element_bytes);
  /// The bytes that memory.recompute=cheap saves: inputs of linears(), but for attention's output; null:
  /// nothing in a block is cheap to compute again.
  int64_t (*cheap_bytes)(const ModelConfig& model, int64_t element_bytes);

  /// Rules of this family alone; null: none. Throws ConfigError.
  void (*check)(const Config& config, const Origins& origins);
};

const ModelFamilyRecord& record_of(ModelFamily family);

/// The weight of the head among the parameters of a rank: of its own unit, or a tied one where the norm
/// before the head is; null: the rank has none, or its head is spread.
const ParamSpec* head_weight(const std::vector<UnitSpec>& units, const ModelConfig& model);

/// The families that read text, in the order of the enumerators.
std::vector<ModelFamily> language_families();

}  // namespace trireme::plan
