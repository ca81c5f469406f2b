// Which tokens ranks along cp have, how much work these are, and which kind of exchange is chosen.
#include "trireme/plan/token_split.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "trireme/plan/model_facts.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

TEST(TokenSplit, RanksTogetherHaveEachTokenOnce) {
  for (const bool zigzag : {false, true}) {
    for (int64_t ranks = 1; ranks <= 5; ++ranks) {
      const int64_t length = 60 * ranks;
      std::multiset<int64_t> tokens;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        int64_t own = 0, before = -1;
        for (const Range& range : TokenSplit{rank, ranks, zigzag}.ranges(length)) {
          EXPECT_GT(range.begin, before) << "they ascend";
          before = range.begin;
          own += range.size();
          for (int64_t token = range.begin; token < range.end; ++token) tokens.insert(token);
        }
        EXPECT_EQ(own, length / ranks);
      }
      EXPECT_EQ(std::ssize(tokens), length);
      EXPECT_EQ(std::ssize(std::set<int64_t>(tokens.begin(), tokens.end())), length);
    }
  }
}

/// A token at place p attends to p + 1 tokens.
int64_t scores_of(const TokenSplit& split, int64_t length) {
  int64_t scores = 0;
  for (const Range& range : split.ranges(length)) {
    for (int64_t token = range.begin; token < range.end; ++token) scores += token + 1;
  }
  return scores;
}

TEST(TokenSplit, RanksOfARingHaveTheSameWork) {
  const int64_t length = 48;
  for (const int64_t ranks : {2, 3, 4, 6}) {
    for (int64_t rank = 0; rank < ranks; ++rank)
      EXPECT_EQ(scores_of({rank, ranks, true}, length), length * (length + 1) / 2 / ranks);
  }
  EXPECT_GT(scores_of({1, 2}, length), 2 * scores_of({0, 2}, length)) << "neighbouring tokens have not";
}

TEST(TokenSplit, ListsTheTokensOfAllRanks) {
  const std::vector<Range> wanted = {{0, 2}, {6, 8}, {2, 4}, {4, 6}};
  EXPECT_EQ((TokenSplit{0, 2, true}.of_all_ranks(8)), wanted);
}

Config config_of(int64_t heads, int64_t kv_heads, int64_t cp, int64_t length) {
  Config config;
  config.model.family = ModelFamily::kLlama;
  config.model.n_heads = heads;
  config.model.n_kv_heads = kv_heads;
  config.model.d_model = 16 * heads;
  config.data.seq_len = length;
  config.parallel.cp = cp;
  config.precision.compute = Dtype::kBf16;
  return config;
}

AttentionBytes bytes_of_kind(const Config& config, CpKind kind, int64_t tokens) {
  const ModelConfig held = split_model(complete(config.model, config.data.seq_len),
                                       {.ranks = config.parallel.tp, .contexts = config.parallel.cp});
  return attention_bytes(config, kind, held, tokens);
}

TEST(TokenSplit, AutoTakesWhatHeadsAndLengthsAllow) {
  EXPECT_EQ(settled_cp_kind(config_of(3, 3, 2, 64)), CpKind::kRing) << "3 heads on 2 ranks";
  EXPECT_EQ(settled_cp_kind(config_of(8, 1, 2, 66)), CpKind::kUlysses) << "66 tokens in 4 pieces";
  Config cut = config_of(4, 4, 4, 64);
  EXPECT_EQ(settled_cp_kind(cut), CpKind::kUlysses);
  cut.parallel.tp = 2;
  cut.model.d_ff = 64;
  EXPECT_EQ(settled_cp_kind(cut), CpKind::kRing) << "2 heads are left for 4 ranks";
  cut.parallel.cp_kind = CpKind::kUlysses;
  EXPECT_EQ(settled_cp_kind(cut), CpKind::kUlysses) << "as it says";
}

TEST(TokenSplit, AutoTakesWhatSendsLess) {
  for (const int64_t kv_heads : {1, 2, 4, 8, 16}) {
    for (const int64_t cp : {2, 4, 8}) {
      for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock, Recompute::kAllButAttention}) {
        Config config = config_of(16, kv_heads, cp, 64);
        config.memory.recompute = recompute;
        const auto sent = [&](CpKind kind) {
          const AttentionBytes bytes = bytes_of_kind(config, kind, 8);
          return bytes.forward + bytes.backward;
        };
        const bool ring = sent(CpKind::kRing) < sent(CpKind::kUlysses);
        EXPECT_EQ(settled_cp_kind(config), ring ? CpKind::kRing : CpKind::kUlysses)
            << kv_heads << " " << cp << " " << name(recompute);
      }
    }
  }
  EXPECT_EQ(settled_cp_kind(config_of(16, 1, 2, 64)), CpKind::kRing) << "few keys and values travel";
  EXPECT_EQ(settled_cp_kind(config_of(16, 16, 2, 64)), CpKind::kUlysses);
  Config wide = config_of(16, 1, 2, 64);
  wide.precision.compute = Dtype::kFp32;
  EXPECT_EQ(settled_cp_kind(wide), CpKind::kUlysses) << "which has a kernel on every device";
  for (const int64_t dim : {136, 256, 36}) {
    Config odd = config_of(16, 1, 2, 64);
    odd.model.head_dim = dim;
    EXPECT_EQ(settled_cp_kind(odd), CpKind::kUlysses) << "heads of " << dim;
  }
}

TEST(TokenSplit, CountsWhatAttentionSends) {
  const Config config = config_of(8, 2, 4, 64);  // head_dim 16, bf16
  const AttentionBytes ring = bytes_of_kind(config, CpKind::kRing, 10);
  const int64_t keys_and_values = 10 * 2 * 2 * 16;
  EXPECT_EQ(ring.forward, 3 * keys_and_values * 2);
  EXPECT_EQ(ring.backward, 3 * keys_and_values * (2 + 4)) << "their gradients in fp32, too";
  EXPECT_EQ(ring.again, ring.forward);
  const AttentionBytes ulysses = bytes_of_kind(config, CpKind::kUlysses, 10);
  EXPECT_EQ(ulysses.forward, 10 * (8 + 8 + 4 + 4) * 16 * 2 * 3 / 4) << "a key and a value head for each rank";
  EXPECT_EQ(ulysses.backward, ulysses.forward);
}

TEST(TokenSplit, LengthsAreMultiplesOfAllParts) {
  ParallelConfig parallel;
  parallel.cp = 4;
  EXPECT_EQ(length_multiple(parallel, CpKind::kUlysses), 4);
  EXPECT_EQ(length_multiple(parallel, CpKind::kRing), 8);
  parallel.tp = 2;
  EXPECT_EQ(length_multiple(parallel, CpKind::kRing), 8);
  parallel.tp = 3;
  EXPECT_EQ(length_multiple(parallel, CpKind::kRing), 24);
}

}  // namespace
}  // namespace trireme::plan
