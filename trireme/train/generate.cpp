#include "trireme/train/generate.h"

#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/round_up.h"

namespace trireme::train {
namespace {

/// The logits of tokens that the tokenizer knows: a model may have rows for more, which training leaves as
/// likely as chance made them.
at::Tensor known(const at::Tensor& logits, int64_t vocab_size) {
  return vocab_size > 0 ? logits.narrow(0, 0, std::min(vocab_size, logits.size(0))) : logits;
}

/// The token that `uniform` in [0, 1) picks from softmax(logits / temperature) over the top_k most likely.
int32_t pick(const at::Tensor& logits, const SamplingOptions& options, double uniform) {
  if (options.temperature == 0.0) return static_cast<int32_t>(logits.argmax().item<int64_t>());
  const int64_t count = options.top_k > 0 ? std::min(options.top_k, logits.numel()) : logits.numel();
  const auto [values, indices] = logits.topk(count);
  const at::Tensor cumulative = at::softmax(values.to(at::kDouble) / options.temperature, 0).cumsum(0);
  const int64_t place = (cumulative <= uniform).sum().item<int64_t>();
  return static_cast<int32_t>(indices[std::min(place, count - 1)].item<int64_t>());
}

}  // namespace

at::Tensor padded(const at::Tensor& tokens, int64_t multiple) {
  const int64_t length = tokens.size(1), more = round_up(length, multiple) - length;
  return more == 0 ? tokens : at::constant_pad_nd(tokens, {0, more});
}

std::vector<int32_t> generate(nn::LanguageModel& model, std::vector<int32_t> prompt,
                              const SamplingOptions& options, at::Device device) {
  const auto next_logits = [&](const at::Tensor& tokens) {
    const at::Tensor logits = model.forward(tokens.to(device)).select(1, tokens.size(1) - 1).squeeze(0);
    return logits.to(at::kCPU, at::kFloat);
  };
  return generate(next_logits, std::move(prompt), options);
}

std::vector<int32_t> generate(const NextLogits& next_logits, std::vector<int32_t> prompt,
                              const SamplingOptions& options) {
  TRIREME_CHECK(!prompt.empty(), "[train.generate] the prompt is empty; give at least one token");
  const at::NoGradGuard no_grad;
  const size_t prompt_size = prompt.size();
  std::vector<int32_t> tokens = std::move(prompt);
  for (int64_t i = 0; i < options.max_tokens; ++i) {
    beat();
    if (options.gives_up && options.gives_up()) break;
    const int64_t seen = std::min(options.context, static_cast<int64_t>(tokens.size()));
    const at::Tensor window =
        at::from_blob(tokens.data() + tokens.size() - static_cast<size_t>(seen), {1, seen}, at::kInt);
    const at::Tensor logits = known(next_logits(window.to(at::kLong)), options.vocab_size);
    const uint64_t bits = mix64(options.seed, static_cast<uint64_t>(i));
    const int32_t token = pick(logits, options, static_cast<double>(bits >> 11) * 0x1.0p-53);
    if (token == options.end_token) break;
    tokens.push_back(token);
  }
  tokens.erase(tokens.begin(), tokens.begin() + static_cast<int64_t>(prompt_size));
  return tokens;
}

}  // namespace trireme::train
