#include "trireme/plan/loss_bytes.h"

#include <algorithm>

#include "trireme/base/round_up.h"
#include "trireme/plan/fp8.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/tensor_split.h"

namespace trireme::plan {
namespace {

bool has_fp8_head(const Config& config) {
  return config.precision.fp8.recipe != Fp8::kOff && config.precision.fp8.head;
}

/// Rows of the head's weight as a GPU multiplies it: nn/loss.cpp adds some of zeros to be faster.
int64_t padded_vocab(const Config& config) {
  constexpr int64_t kAligned = 64;
  const int64_t multiple = has_fp8_head(config) ? fp8_multiple(config.precision.fp8.recipe) : 1;
  return round_up(config.model.vocab_size, std::max(kAligned, multiple));
}

/// Bytes of a head's FP8 copies: the gradients of its logits, of which `logits` bytes of bf16 are there at
/// once, and its weight of `weight` elements, each twice with a byte for an element.
double fp8_copies_of_head(const Config& config, double logits, double weight) {
  return has_fp8_head(config) ? logits + 2.0 * weight : 0.0;
}

/// Elements of the head's weight on a rank whose gradient the loss makes: none where it is frozen.
double trained_head(const Config& config, const ModelFacts& facts, double vocab) {
  const ParamSpec* const weight = head_weight(facts.units, complete(config.model, config.data.seq_len));
  const bool frozen = weight != nullptr && weight->frozen;
  return frozen ? 0.0 : vocab * static_cast<double>(config.model.d_model);
}

/// Every rank has all rows of the head's input and of its gradient while it makes the loss, logits of some
/// rows at a time, and keeps the gradients of its own rows and of its part of the weight, if that is trained.
LossBytes cut_loss(const Config& config, const ModelFacts& facts, int64_t tokens) {
  const auto bytes = static_cast<double>(bytes_of(config.precision.compute)),
             width = static_cast<double>(config.model.d_model), rows = static_cast<double>(tokens),
             vocab = static_cast<double>(
                 split_model(complete(config.model, config.data.seq_len), facts.split).vocab_size),
             chunk = static_cast<double>(config.memory.loss_chunk_mib << 20);
  return {.at_work = at_most_62_bits(std::min(rows * vocab * bytes, chunk) + 2.0 * rows * width * bytes),
          .kept = at_most_62_bits(
              (rows / static_cast<double>(facts.split.ranks) * width + trained_head(config, facts, vocab)) *
              bytes)};
}

/// A CPU keeps the logits and what made them. A GPU computes them in parts and keeps the gradients of the
/// head's input and weight; if the vocabulary is padded, there is also a padded copy of the weight.
LossBytes loss_of(const Config& config, const ModelFacts& facts, int64_t tokens, Device device) {
  if (facts.split.ranks > 1) return cut_loss(config, facts, tokens);
  const auto width = static_cast<double>(config.model.d_model),
             bytes = static_cast<double>(bytes_of(config.precision.compute)),
             rows = static_cast<double>(tokens);
  if (device == Device::kCpu) {
    const auto vocab = static_cast<double>(config.model.vocab_size);
    return {.kept = at_most_62_bits(rows * (vocab + width) * bytes)};
  }
  const auto vocab = static_cast<double>(padded_vocab(config));
  const double part = std::min(rows * vocab * bytes, static_cast<double>(config.memory.loss_chunk_mib << 20));
  const double copy = padded_vocab(config) == config.model.vocab_size ? 0.0 : vocab * width * bytes;
  return {.at_work = at_most_62_bits(part + fp8_copies_of_head(config, part, vocab * width) + copy),
          .kept = at_most_62_bits((rows * width + trained_head(config, facts, vocab)) * bytes)};
}

/// A part of the head has some of its logits as exponentials or gradients in the dtype of computation, and on
/// a CPU in fp32, twice, as well.
int64_t at_work_on_part(const Config& config, int64_t tokens, int64_t rows, Device device) {
  const auto logits = static_cast<double>(tokens) * static_cast<double>(rows),
             element = static_cast<double>(bytes_of(config.precision.compute)),
             chunk = static_cast<double>(config.memory.loss_chunk_mib << 20);
  if (device == Device::kCuda) return at_most_62_bits(std::min(logits * element, chunk));
  constexpr double kTwice = 2.0 * kFp32Bytes;
  return at_most_62_bits(std::min(logits * kTwice, chunk) * (1.0 + element / kTwice));
}

/// The loss of a model in one piece: the head's input counts as activations, and models of images have whole
/// logits.
LossBytes loss_of_whole(const Config& config, const ModelFacts& facts, int64_t tokens, Device device) {
  if (facts.split.ranks > 1 || (device == Device::kCuda && !reads_images(config.model.family)))
    return loss_of(config, facts, tokens, device);
  return {.kept = at_most_62_bits(
              static_cast<double>(tokens) *
              static_cast<double>(config.model.vocab_size * bytes_of(config.precision.compute)))};
}

}  // namespace

LossBytes loss_of_rank(const Config& config, const ModelFacts& facts, int64_t tokens, Device device,
                       const PipelinePlan& plan, int64_t pp_rank) {
  if (config.parallel.pp == 1 || reads_images(config.model.family))
    return loss_of_whole(config, facts, tokens, device);
  if (!plan.schedule.spread_head) return loss_of(config, facts, tokens, device);
  const auto& rows = plan.split.vocabulary;
  const auto rank = static_cast<size_t>(pp_rank);
  const int64_t at_work = at_work_on_part(config, tokens, rows[rank + 1] - rows[rank], device);
  return {.at_work = at_work, .at_work_again = at_work};
}

}  // namespace trireme::plan
