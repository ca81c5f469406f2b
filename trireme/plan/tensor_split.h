#pragma once
// What one of several ranks along tp has of a model: a smaller model, whose parameters are parts of the whole
// one's (Shoeybi et al. 2019, Megatron-LM). Heads of attention, features of the feed-forward part and rows of
// the vocabulary are cut; norms, biases behind a sum over ranks and tables of positions are on all ranks,
// each of which applies them to rows of its own (nn/joint.h).
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/plan/mesh_shape.h"
#include "trireme/plan/model_facts.h"

namespace trireme::plan {

/// The place of global rank `rank` along tp.
TensorSplit tensor_split(const MeshShape& mesh, int64_t rank);

/// The place with the largest part of a vocabulary.
inline TensorSplit largest_split(const ParallelConfig& parallel) {
  return {parallel.tp, parallel.tp - 1, parallel.cp};
}

/// Why a complete model cannot be cut so, with the numbers of ranks that could; empty: it can.
std::string split_obstacle(const ModelConfig& model, int64_t ranks);

/// The model of one rank; `model` is complete, and its split_obstacle() empty. With more ranks than key and
/// value heads, neighbours have the same head.
ModelConfig split_model(const ModelConfig& model, const TensorSplit& split);
/// The first row of each rank's part of the vocabulary, and behind them its size.
std::vector<int64_t> split_vocabulary(const ModelConfig& model, int64_t ranks);

/// Bytes that a token of this rank keeps for backward beyond block_bytes(), where the block multiplies in
/// FP8: layers that make features keep their input in the dtype of computation, as a copy in FP8 would have
/// the rows of all ranks (nn/linear_parts.h).
int64_t kept_as_rows(const ModelConfig& model, const PrecisionConfig& precision, const MemoryConfig& memory,
                     const TensorSplit& split, int64_t layer, BlockPart part = BlockPart::kWhole);

/// describe() for one rank: units hold its parts. A token is one of the whole sequences; `params`, FLOPs and
/// activations are the rank's share of the whole model's.
ModelFacts describe(const ModelConfig& model, int64_t seq_len, const PrecisionConfig& precision,
                    const MemoryConfig& memory, const TensorSplit& split);

}  // namespace trireme::plan
