#pragma once
// Learns byte-pair encoding from the words of texts (Sennrich et al. 2016), over bytes as in GPT-2 (Radford
// et al. 2019), with the merges that the BpeTrainer of Python's `tokenizers` learns from the same words.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "trireme/text/word_counts.h"

namespace trireme::text {

struct BpeTraining {
  int64_t vocab_size = 4096;              ///< at most; special tokens and bytes are a part of it
  std::vector<std::string> special = {};  ///< get the first ids
  /// Called now and then with the tokens that there are; what it throws ends the training.
  std::function<void(int64_t tokens)> on_progress = {};
};

struct TrainedBpe {
  std::vector<std::string> special;
  std::vector<std::string> tokens;                  ///< by id; in GPT-2's alphabet but for special ones
  std::vector<std::pair<int32_t, int32_t>> merges;  ///< ids, in the order in which they were learned
  int64_t text_tokens = 0;                          ///< tokens of all words that it was learned from
};

/// Merges the most frequent pair of neighbours, of equally frequent ones that with the smallest ids, until
/// there are vocab_size tokens or no pair is left: then tokens are fewer. Throws ConfigError where bytes and
/// special tokens do not fit in vocab_size, for one beyond kMostTokens, and for an empty special token.
TrainedBpe train_bpe(std::span<const WordCount> words, const BpeTraining& training);

/// A tokenizer.json that load_tokenizer() and Python's `tokenizers` read.
std::string tokenizer_json(const TrainedBpe& trained);

}  // namespace trireme::text
