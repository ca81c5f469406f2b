#pragma once
// Low-rank adapters (Hu et al. 2021, LoRA: Low-Rank Adaptation of Large Language Models): the weights of a
// model stay as they are, and each adapted linear layer W gets two thin matrices that are trained instead: y
// = x W^T + alpha / rank (x A^T) B^T, with A (rank, in) and B (out, rank), which begins at zero. The names
// are those of PEFT: MODULE.lora_A.weight and MODULE.lora_B.weight.
//
// DoRA (Liu et al. 2024, DoRA: Weight-Decomposed Low-Rank Adaptation) trains the length m of each row of what
// they make as well: y_i = m_i / |(W + alpha / rank B A)_i| ((W + alpha / rank B A) x)_i, where the norm has
// no gradient. MODULE.lora_magnitude_vector (out) holds m_i - |W_i|, which begins at zero and in few bits
// changes nothing then; files of PEFT have m.
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/plan/config.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

inline constexpr const char* kAdapterIn = ".lora_A";                 ///< behind a module's path: A's module
inline constexpr const char* kAdapterOut = ".lora_B";                ///< B's
inline constexpr const char* kMagnitude = ".lora_magnitude_vector";  ///< behind it: what is added to lengths

/// The names of what the layer of a weight has beside it. Empty: the parameter is no weight of a layer.
struct AdapterNames {
  std::string first, second, magnitude;
};
AdapterNames adapter_names(const std::string& weight);

/// Whether adapters are trained in place of the model's weights.
inline bool has_adapters(const Config& config) {
  return config.model.adapter.kind != AdapterKind::kNone;
}

/// The model of the weights that a run leaves: adapters have been added to them.
ModelConfig without_adapters(ModelConfig model);

/// Whether the linear layer of a block that has this name within its part, such as "q_proj", is adapted.
bool adapts(const AdapterConfig& adapter, std::string_view module);
/// Whether the parameter belongs to an adapter.
bool is_of_adapter(std::string_view parameter);
/// Whether the layer of this weight has an adapter among the parameters of the unit.
bool has_adapter(const UnitSpec& unit, const ParamSpec& weight);
/// Whether it is what DoRA adds to the lengths of rows.
inline bool is_magnitude(std::string_view parameter) {
  return parameter.ends_with(kMagnitude);
}
/// The factor of an adapter's product: alpha / rank.
double scale_of(const AdapterConfig& adapter);

/// Whether blocks draw random numbers in training: those of the model's dropout, or of its adapters'.
bool draws_in_training(const ModelConfig& model);

/// Whether a gradient reads the output of the block's last product, that of a length of its rows.
bool reads_last_product(const UnitSpec& block);
/// What adapters keep for backward beside what layers without them do, in bytes a token of a block or of a
/// half of it: with dropout what each A reads, and a mask of a byte an element; of DoRA the output of each
/// layer before its rows get their lengths, and with dropout instead of it that of another product.
int64_t adapter_bytes(const ModelConfig& model, BlockPart part, int64_t element_bytes);

/// Outputs of norms and activations that adapters keep for backward, in bytes a token of a block or of a half
/// of it: what the matrices A read, once for layers on one input. With dropout it is none of these.
int64_t read_bytes(const ModelConfig& model, BlockPart part, int64_t element_bytes);

/// The names of the linear layers in a block of the model, in their order.
std::vector<std::string> linear_layers(const ModelConfig& model);
/// Throws ConfigError where a target is no layer of the model's blocks, naming those that there are.
void check_targets(const ModelConfig& model, const std::string& said);

/// Freezes all parameters of the units and gives the blocks their adapters; does nothing without adapters.
/// Says which are held in four bits: the matrices of blocks, where config has it so.
/// Those of a block's attention follow the other parameters of its attention.
void adapt(std::vector<UnitSpec>& units, const ModelConfig& model);
/// How many of a block's parameters, the first ones, are those of its attention, adapters included.
size_t attention_params(const UnitSpec& block, const ModelConfig& model);

/// Bytes of the weights, decoded from four bits, of the largest product of a model's block; 0 where none are
/// held so.
int64_t decoded_bytes(const ModelFacts& facts, int64_t element_bytes);

/// Elements that are trained.
int64_t trained_params(const ModelFacts& facts);

}  // namespace trireme::plan
