#pragma once
// How a model is cut into the stages of a pipeline, by what its parts cost.
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/plan/model_facts.h"

namespace trireme::plan {

/// A part of a model that stays in one stage.
struct StagePart {
  std::string name;        ///< of the unit
  double flops = 0.0;      ///< forward, for a token
  int64_t params = 0;      ///< of a tied head its copy of the embeddings
  double attention = 0.0;  ///< of `flops`: scores, and values times them, which have no weights
  double frozen = 0.0;     ///< of `flops`: products with weights of which no gradient is computed
};

/// The time of passes, as FLOPs for a token of matrix products that take as long.
struct PassWork {
  double forward = 0.0, backward_input = 0.0, backward_weight = 0.0;
  double all() const { return forward + backward_input + backward_weight; }
  PassWork& operator+=(const PassWork& other);
};
/// A product costs as much in each pass. Attention is slower than that, has no backward pass for weights, and
/// in the one for its input five products for two of forward. All of the head counts as forward: of models of
/// text it makes its gradients together with the loss, as on GPUs, and in models of images it is too small
/// to matter when. Weights that are frozen for good have no pass of their own.
PassWork work_of(const StagePart& part);

/// Where stages may begin: at blocks, or also between a block's attention and the rest of it, where the
/// family can.
enum class CutAt { kBlocks, kHalves };

/// Embeddings or the stem with the first block, the other blocks, the head; `model` is complete, `facts` are
/// its. With `spread_head`, of models of text, the head's product is no part: every stage computes a share of
/// the vocabulary. Blocks of models of images have no halves.
std::vector<StagePart> stage_parts(const ModelConfig& model, const ModelFacts& facts,
                                   bool spread_head = false, CutAt cut_at = CutAt::kBlocks);

struct StageSplit {
  bool of_halves = false;           ///< a part is half a block
  std::vector<int64_t> first;       ///< part with which each stage begins; one more than there are stages
  std::vector<double> flops;        ///< forward, for a token, by stage
  std::vector<PassWork> work = {};  ///< by stage, without its share of a head that is spread
  /// For a head that is spread over the ranks of a pipeline, the first row of each rank's part of its weight,
  /// and then the number of rows; empty: the head is a part of the last stage.
  std::vector<int64_t> vocabulary = {};
  double spread_flops = 0.0;  ///< of the whole of such a head; each stage counts an equal share of them
  /// All passes of a stage and of its share of a head that is spread.
  double all_work(size_t stage) const;
  /// The share of all work in each stage.
  std::vector<double> shares() const;
};
/// The split whose stages begin with the parts `first`, one more than there are stages.
StageSplit cut_at(std::vector<int64_t> first, const std::vector<StagePart>& parts, double spread_flops);

/// Cuts where the stage with most work has least of it. With `ranks`, the rank of each stage, where the rank
/// that has most work has least of it. Throws ConfigError when there are more stages than parts.
StageSplit split_by_cost(const std::vector<StagePart>& parts, int64_t stages, double spread_flops = 0.0,
                         const std::vector<int64_t>& ranks = {});
/// The split with equal numbers of blocks in all stages, or one more in some, and the head with the last.
StageSplit split_evenly(const std::vector<StagePart>& parts, int64_t stages, double spread_flops = 0.0);

/// So many blocks in each stage; the head goes with the last one, which alone may have none. Throws
/// ConfigError when that does not fit the parts.
StageSplit split_by_blocks(const std::vector<StagePart>& parts, const std::vector<int64_t>& blocks,
                           double spread_flops = 0.0);

/// Shares the rows of a vocabulary among `ranks`, as StageSplit::vocabulary has them: equally, in multiples
/// of 64 rows, which GPUs multiply faster, if 64 is at most a sixteenth of a rank's rows. Rows have `width`
/// elements, and each rank's begin at a multiple of 8 elements, since optimizers round state in few bits by
/// blocks. Throws ConfigError for fewer rows than ranks can share so.
std::vector<int64_t> share_rows(int64_t vocab_size, int64_t ranks, int64_t width = 8);

/// Units of nn::Model::units(), from what comes before the blocks, 0, over the blocks to the head.
struct UnitRange {
  int64_t first = 0, end = 0;
  bool from_mlp = false;      ///< the attention of the first one is in the stage before
  bool to_attention = false;  ///< what follows attention in the last one is in the stage behind
  bool norm_alone = false;    ///< of the head the final norm: the rest of it is spread
  /// For a part of a head that is spread, the rows of its weight, without the norm; else none.
  std::optional<Range> vocabulary = {};
  bool operator==(const UnitRange&) const = default;
};
/// The units of a stage; the embedding goes with the first one. Behind the stages come the parts of a head
/// that is spread, one a rank.
UnitRange units_of_stage(const StageSplit& split, int64_t stage);
/// The units of the engine of a stage: the root, which has no parameters in the middle of a model, and those
/// in `range`. If the head is tied, the last stage has a copy of the embeddings in its root. Where the head
/// is spread, tied or not, the final norm is a unit of its own, and each part another one, of rows of the
/// head's weight or of the embeddings to which that is tied.
std::vector<UnitSpec> stage_units(const ModelConfig& model, const ModelFacts& facts, UnitRange range);

/// Forward FLOPs for a token of the head's product.
double head_flops(const ModelConfig& model);

}  // namespace trireme::plan
