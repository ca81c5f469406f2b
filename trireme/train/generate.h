#pragma once
// Text from a model, one token at a time.
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "trireme/nn/language_model.h"

namespace trireme::train {

struct SamplingOptions {
  int64_t max_tokens = 256;
  double temperature = 0.8;  ///< 0: always the most likely token
  int64_t top_k = 0;         ///< sample among the k most likely; 0: all
  int64_t vocab_size = 0;    ///< tokens from here on are never taken, as no tokenizer knows them; 0: all are
  std::optional<int32_t> end_token = {};  ///< the text ends before it
  uint64_t seed = 42;
  int64_t context = 128;                ///< the model sees the last `context` tokens
  std::function<bool()> gives_up = {};  ///< asked before each token; true: no more are made
};

/// tokens (1, T) with zeros behind them up to a length that `multiple` divides: a model that splits tokens
/// over as many ranks needs that, and what comes later changes no logits.
at::Tensor padded(const at::Tensor& tokens, int64_t multiple);

/// (1, T) int64 tokens on the CPU -> (V) fp32 logits on the CPU for the token that follows.
using NextLogits = std::function<at::Tensor(const at::Tensor& tokens)>;

/// The tokens that follow `prompt` (not empty). Deterministic in the seed, so ranks that hold the same
/// weights get the same text.
std::vector<int32_t> generate(nn::LanguageModel& model, std::vector<int32_t> prompt,
                              const SamplingOptions& options, at::Device device);
std::vector<int32_t> generate(const NextLogits& next_logits, std::vector<int32_t> prompt,
                              const SamplingOptions& options);

}  // namespace trireme::train
