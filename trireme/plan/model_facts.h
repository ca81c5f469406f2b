#pragma once
// Facts about a model, known before any device exists: its parameters with Hugging Face names and shapes, the
// units that sharding works on, FLOPs and bytes. The built modules must agree with it, which is a test.
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/plan/block_layer.h"
#include "trireme/plan/config.h"
#include "trireme/plan/part.h"

namespace trireme::plan {

/// The initial values of a parameter: a normal distribution, or `mean` everywhere where the deviation is 0.
struct InitialValues {
  double mean = 0.0;
  double deviation = 0.0;
};

struct ParamSpec {
  std::string name;            ///< "transformer.h.0.attn.c_attn.weight"
  std::vector<int64_t> shape;  ///< of what is held; of a whole parameter as Hugging Face checkpoints have it
  InitialValues initial = {};
  bool decays = shape.size() >= 2;       ///< weight decay applies; unless said otherwise, to matrices
  std::optional<BlockLayer> layer = {};  ///< the linear layer of a block that it is a weight of
  Part part = {};                        ///< of a larger parameter of this name
  int64_t packed = 1;   ///< matrices (or vectors) that lie side by side in the dimension of features
  bool frozen = false;  ///< for good: it has no gradient, no master and no optimizer state
  bool nf4 = false;     ///< frozen, and held in four bits (base/nf4_format.h)
  int64_t numel() const;
};

/// Bytes that a model of images, or a unit of one, keeps for backward on a GPU, at the compute dtype.
struct SavedOnGpu {
  double of_image = 0.0;
  double of_micro_batch = 0.0;  ///< whatever its size: weights of convolutions in another layout
  double of_first_unit = 0.0;   ///< of a micro-batch, more where its input comes from another stage
};

/// The costs of a unit of a model of images for one image.
struct ImageCosts {
  double flops = 0.0;        ///< forward
  double saved_bytes = 0.0;  ///< kept for backward on a CPU, at the compute dtype
  SavedOnGpu saved_on_gpu = {};
  double output_bytes = 0.0;
  std::vector<int64_t> synced_channels = {};  ///< of each norm over all data-parallel ranks, of any batch
  bool computed_again = false;                ///< in backward
};

/// A group of parameters that is gathered, reduced and freed together.
struct UnitSpec {
  std::string name;               ///< kRootUnit, the block's module path, "transformer.h.0", or kHeadUnit
  std::vector<ParamSpec> params;  ///< in flat-buffer order
  /// The number of a block whose matrices travel in FP8 where they are gathered (Fp8Config::gather).
  std::optional<int64_t> fp8_block = {};
  ImageCosts image = {};
  int64_t numel() const;
  /// Its parameters that are trained, and those that are frozen for good.
  std::vector<ParamSpec> trained() const;
  std::vector<ParamSpec> frozen() const;
};

/// A tensor that a module keeps beside its parameters: running statistics of batch norm.
struct BufferSpec {
  std::string name;            ///< "layer1.0.bn1.running_mean"
  std::vector<int64_t> shape;  ///< empty: a count, int64; else fp32
};

/// Suffixes of a block's name, for units that are its attention, or the rest of the block.
inline constexpr const char* kAttentionHalf = ".attention";
inline constexpr const char* kMlpHalf = ".mlp";
inline constexpr const char* kRootUnit = "root";
inline constexpr const char* kHeadUnit = "head";

/// One of several ranks that a model is cut over (tensor_split.h), and of several that have some tokens of
/// each sequence. The default is the whole model, and whole sequences.
struct TensorSplit {
  int64_t ranks = 1;
  int64_t rank = 0;
  int64_t contexts = 1;  ///< ranks along cp
  bool operator==(const TensorSplit&) const = default;
};

/// In models of images a token is an image.
struct ModelFacts {
  /// In forward order: the root (embeddings), the blocks, the head (final norm, output matrix). The
  /// parameters of a tied head are in the root.
  std::vector<UnitSpec> units;
  std::vector<BufferSpec> buffers = {};  ///< of models of images
  int64_t params = 0;                    ///< tied weights counted once
  int64_t matmul_params = 0;  ///< blocks and head, no embedding lookup, no norms, no biases; of images: 0
  int64_t frozen_matmul_params = 0;  ///< of these, those that are frozen for good
  /// Forward and backward: 6 matmul_params, 4 of those that are frozen for good, and with attention 6 T heads
  /// head_dim L (causal half).
  double flops_per_token = 0.0;
  double saved_bytes_per_token = 0.0;  ///< activations kept for backward, all layers, at the compute dtype
  std::optional<SavedOnGpu> saved_on_gpu = {};  ///< where that differs: of models of images
  TensorSplit split = {};                       ///< whose facts these are
};

/// Bytes that one token keeps in a block, or in a half of one.
struct BlockBytes {
  int64_t saved = 0;  ///< activations, for backward
  /// Kept from the backward pass for the input to that for the weights, where they are apart: inputs of
  /// linear layers, and gradients of their outputs.
  int64_t between_halves = 0;
};
enum class BlockPart { kWhole, kAttention, kRest };
/// `model` is complete (see complete()) and a language model, `seq_len` the tokens of a sequence, whose
/// scores model.attention=eager keeps.
BlockBytes block_bytes(const ModelConfig& model, int64_t seq_len, const PrecisionConfig& precision,
                       const MemoryConfig& memory, int64_t layer, BlockPart part = BlockPart::kWhole);
/// Bytes that one token needs beside what is kept while a block's attention goes backward: gradients of its
/// scores before and behind the softmax, in fp32, with model.attention=eager; else 0.
int64_t score_gradient_bytes(const ModelConfig& model, int64_t seq_len);

/// `seq_len` is T above. Fields left at 0 in `model` take their defaults first (see complete()).
ModelFacts describe(const ModelConfig& model, int64_t seq_len, const PrecisionConfig& precision = {},
                    const MemoryConfig& memory = {});

/// Width of an attention head: model.head_dim, or d_model / n_heads where that is 0.
int64_t head_dim(const ModelConfig& model);

/// `model` with its 0-means-default fields filled in, but for head_dim.
ModelConfig complete(ModelConfig model, int64_t seq_len);

}  // namespace trireme::plan
