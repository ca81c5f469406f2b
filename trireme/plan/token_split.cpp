#include "trireme/plan/token_split.h"

#include <algorithm>
#include <numeric>

#include "trireme/plan/model_facts.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {

std::vector<Range> TokenSplit::ranges(int64_t length) const {
  const int64_t size = length / (ranks * pieces());
  const auto piece = [size](int64_t index) { return Range{index * size, (index + 1) * size}; };
  if (!zigzag) return {piece(rank)};
  return {piece(rank), piece(2 * ranks - 1 - rank)};
}

std::vector<Range> TokenSplit::of_all_ranks(int64_t length) const {
  std::vector<Range> all;
  for (int64_t other = 0; other < ranks; ++other) {
    const std::vector<Range> its = TokenSplit{other, ranks, zigzag}.ranges(length);
    all.insert(all.end(), its.begin(), its.end());
  }
  return all;
}

bool can_share_heads(int64_t heads, int64_t kv_heads, int64_t ranks) {
  return heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0);
}

int64_t length_multiple(const ParallelConfig& parallel, CpKind kind) {
  const TokenSplit split{.rank = 0, .ranks = parallel.cp, .zigzag = kind == CpKind::kRing};
  return parallel.cp * std::lcm(parallel.tp, split.pieces());
}

namespace {

/// Elements of queries, keys, values and the output are exchanged. Where there are fewer key and value heads
/// than ranks, each rank gets one.
AttentionBytes ulysses_bytes(const Config& config, const ModelConfig& held, int64_t tokens) {
  const int64_t ranks = config.parallel.cp, kv_heads = std::max(held.n_kv_heads, ranks);
  const int64_t elements = tokens * (2 * held.n_heads + 2 * kv_heads) * head_dim(held);
  const int64_t bytes =
      wire_bytes(Collective::kAllToAll, elements * bytes_of(config.precision.compute), ranks);
  return {Collective::kAllToAll, bytes, bytes, bytes};
}

/// Keys and values visit every rank, and in backward their gradients, in fp32, too.
AttentionBytes ring_bytes(const Config& config, const ModelConfig& held, int64_t tokens) {
  const int64_t passes = config.parallel.cp - 1;
  const int64_t elements = tokens * 2 * held.n_kv_heads * head_dim(held);
  const int64_t forward = passes * elements * bytes_of(config.precision.compute);
  return {Collective::kSend, forward, forward, forward + passes * elements * kFp32Bytes};
}

/// Whether GPUs have a fused kernel for attention of some queries over some keys (nn/attention_part.cpp).
bool has_kernel_of_parts(const Config& config, const ModelConfig& held) {
  constexpr int64_t kMultiple = 8, kMost = 128;
  const int64_t dim = head_dim(held);
  return config.precision.compute != Dtype::kFp32 && dim % kMultiple == 0 && dim <= kMost;
}

}  // namespace

AttentionBytes attention_bytes(const Config& config, CpKind kind, const ModelConfig& held, int64_t tokens) {
  return kind == CpKind::kRing ? ring_bytes(config, held, tokens) : ulysses_bytes(config, held, tokens);
}

CpKind settled_cp_kind(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  if (parallel.cp == 1) return CpKind::kUlysses;
  if (parallel.cp_kind != CpKind::kAuto) return parallel.cp_kind;
  if (config.data.reset_attention) return CpKind::kUlysses;
  const ModelConfig held = split_model(complete(config.model, config.data.seq_len),
                                       {.ranks = parallel.tp, .contexts = parallel.cp});
  const auto divides = [&](CpKind kind) {
    return config.data.seq_len % length_multiple(parallel, kind) == 0;
  };
  if (!divides(CpKind::kRing)) return CpKind::kUlysses;
  if (!can_share_heads(held.n_heads, held.n_kv_heads, parallel.cp)) return CpKind::kRing;
  if (!has_kernel_of_parts(config, held)) return CpKind::kUlysses;
  // Not with what recomputation sends: saving memory must change no bit.
  const auto sent = [&](CpKind kind) {
    const AttentionBytes bytes = attention_bytes(config, kind, held, config.data.seq_len / parallel.cp);
    return bytes.forward + bytes.backward;
  };
  return sent(CpKind::kRing) < sent(CpKind::kUlysses) ? CpKind::kRing : CpKind::kUlysses;
}

int64_t length_multiple(const Config& config) {
  return length_multiple(config.parallel, settled_cp_kind(config));
}

TokenSplit token_split(const Config& config, int64_t cp_rank) {
  return {.rank = cp_rank, .ranks = config.parallel.cp, .zigzag = settled_cp_kind(config) == CpKind::kRing};
}

}  // namespace trireme::plan
