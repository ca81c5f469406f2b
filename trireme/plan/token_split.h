#pragma once
// Which tokens of each sequence a rank along cp has, and what these ranks send each other for attention: by
// Ulysses, tokens for heads and back (Jacobs et al. 2023); by a ring, keys and values from neighbour to
// neighbour (Liu et al. 2023).
#include <cstdint>
#include <vector>

#include "trireme/plan/config.h"
#include "trireme/plan/cost.h"
#include "trireme/plan/region.h"

namespace trireme::plan {

/// The tokens of one of several ranks. The default is whole sequences. Neighbouring tokens, but for a ring:
/// causal attention has more to compute for later ones, so rank r of n has pieces r and 2n-1-r of 2n, which
/// makes the work of all ranks equal.
struct TokenSplit {
  int64_t rank = 0, ranks = 1;
  bool zigzag = false;

  int64_t pieces() const { return zigzag ? 2 : 1; }  ///< of one rank
  /// Where they lie in a sequence of `length` tokens, a multiple of ranks x pieces, in ascending order.
  std::vector<Range> ranges(int64_t length) const;
  /// The place of each rank's tokens, one rank after another: its ranges() for rank 0, 1, ...
  std::vector<Range> of_all_ranks(int64_t length) const;
};

/// parallel.cp_kind; of kAuto Ulysses with data.reset_attention, which rings do not know, else the kind that
/// heads and data.seq_len allow, if both do: Ulysses in fp32 and for
/// heads that are no multiple of 8 or wider than 128 (for a ring of these GPUs have no kernel), else that
/// which sends fewer bytes in a pass forward and backward, whatever is computed again. With cp above 1 the
/// model has attention.
CpKind settled_cp_kind(const Config& config);
TokenSplit token_split(const Config& config, int64_t cp_rank);

/// Whether each of `ranks` ranks can have some of these heads, and as many.
bool can_share_heads(int64_t heads, int64_t kv_heads, int64_t ranks);
/// Lengths of sequences that parallel.cp and parallel.tp can share out are multiples of this.
int64_t length_multiple(const ParallelConfig& parallel, CpKind kind);
int64_t length_multiple(const Config& config);

/// The bytes that a rank sends for attention in one block.
struct AttentionBytes {
  Collective collective = Collective::kAllToAll;
  int64_t forward = 0;
  int64_t again = 0;  ///< where backward computes attention again
  int64_t backward = 0;
};
/// `kind` is settled; `tokens` are those of this rank in a micro-batch. `held` is this rank's model, as
/// split_model() has it.
AttentionBytes attention_bytes(const Config& config, CpKind kind, const ModelConfig& held, int64_t tokens);

}  // namespace trireme::plan
