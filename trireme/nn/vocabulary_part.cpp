#include "trireme/nn/vocabulary_part.h"

#include <algorithm>
#include <limits>

#include "trireme/kernels/cross_entropy.h"
#include "trireme/kernels/matmul.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr int64_t kStats = 3;
constexpr int64_t kStatBytes = 16;  ///< of a message: rows begin where GPUs load 16 bytes at once
constexpr double kNoLogit = -std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// Columns of a message that hold the stats.
int64_t stat_columns(at::ScalarType dtype) {
  return kStatBytes / static_cast<int64_t>(c10::elementSize(dtype));
}

/// The stats of a message (N, 2 D + k) -> (N, 3), a view.
at::Tensor stats_of(const at::Tensor& message) {
  const at::Tensor numbers = message.view(at::kFloat);
  return numbers.narrow(1, numbers.size(1) - kStats, kStats);
}

/// The places of targets in a part of `rows` rows from `first` on.
struct Place {
  at::Tensor here;  ///< (N) bool
  at::Tensor row;   ///< (N, 1) int64; 0 where it is elsewhere
};

Place place_of(const at::Tensor& targets, int64_t first, int64_t rows) {
  const at::Tensor row = targets - first;
  at::Tensor here = row.ge(0).logical_and_(row.lt(rows));
  return {here, row.masked_fill(here.logical_not(), 0).unsqueeze(1)};
}

/// Tokens of which something is made of the logits at once: on a GPU as much as these, else fp32, twice.
int64_t tokens_at_once(int64_t chunk_bytes, const at::Tensor& logits) {
  const auto of_logit = logits.is_cuda() ? static_cast<int64_t>(logits.element_size())
                                         : 2 * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>(chunk_bytes / (of_logit * logits.size(1)), 1,
                             std::max<int64_t>(1, logits.size(0)));
}

/// Calls body(first token, how many) for parts of the tokens.
template <typename Body>
void in_chunks(int64_t chunk_bytes, const at::Tensor& logits, const Body& body) {
  const int64_t all = logits.size(0), chunk = tokens_at_once(chunk_bytes, logits);
  for (int64_t from = 0; from < all; from += chunk) body(from, std::min(chunk, all - from));
}

/// exp(logit - largest) of logits (n, R), 0 for the target, undefined where nobody wants them; stats (3, n).
/// The target's power is left out here and join_vocabulary() adds what it makes of the gradient in fp32:
/// rounded to bf16, a probability near 1 would leave no gradient.
at::Tensor powers_of(const at::Tensor& logits, const at::Tensor& targets, int64_t first, at::Tensor stats,
                     bool wanted) {
  if (logits.is_cuda()) {
    at::Tensor powers = wanted ? at::empty_like(logits) : at::Tensor();
    kernels::vocabulary_part(powers, stats, logits, targets, first);
    return powers;
  }
  const Place place = place_of(targets, first, logits.size(1));
  const at::Tensor part = logits.to(at::kFloat, false, /*copy=*/true);
  const at::Tensor largest = part.amax(1, /*keepdim=*/true);
  stats[0].copy_(largest.squeeze(1));
  at::Tensor of_target = part.gather(1, place.row).squeeze(1);
  of_target.masked_fill_(of_target.eq(kNoLogit), kNan).masked_fill_(place.here.logical_not(), kNoLogit);
  stats[2].copy_(of_target);
  const at::Tensor powers = part.sub_(largest).exp_();
  stats[1].copy_(powers.sum(1));
  if (!wanted) return {};
  powers.scatter_(1, place.row, powers.gather(1, place.row).masked_fill_(place.here.unsqueeze(1), 0.0));
  return powers.to(logits.scalar_type());
}

/// The gradients of logits (n, R), in their dtype; totals (3, n) are those of the whole vocabulary. On a GPU
/// they may lie in `gradients` (n, R), which may be the logits; undefined: in memory of their own.
at::Tensor logit_gradients(const at::Tensor& logits, const at::Tensor& targets, int64_t first,
                           const at::Tensor& totals, at::Tensor gradients = {}) {
  if (logits.is_cuda()) {
    if (!gradients.defined()) gradients = at::empty_like(logits);
    kernels::vocabulary_part_gradient(gradients, logits, targets, first, totals);
    return gradients;
  }
  const Place place = place_of(targets, first, logits.size(1));
  const at::Tensor scale = totals[2].unsqueeze(1);
  at::Tensor exact = logits.to(at::kFloat, false, /*copy=*/true);
  exact.sub_(totals[0].unsqueeze(1)).exp_().mul_(scale / totals[1].unsqueeze(1));
  exact.masked_fill_(scale.eq(0.0), 0.0);  // of ignored targets, whatever their logits are
  exact.scatter_add_(1, place.row, scale.neg() * place.here.unsqueeze(1));
  return exact.to(logits.scalar_type());
}

class VocabularyPartFunction : public Function<VocabularyPartFunction> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                               const at::Tensor& targets_in, int64_t first, int64_t chunk_bytes,
                               bool wants_gradient) {
    const InUse in_use{x, weight};
    const at::Tensor rows = x.reshape({-1, x.size(-1)}).contiguous();
    const at::Tensor targets = targets_in.reshape({-1}).contiguous();
    const at::Tensor logits = kernels::product(rows, weight.t());
    const int64_t tokens = rows.size(0), width = rows.size(1);
    const auto numbers = x.options().dtype(at::kFloat).requires_grad(false);
    at::Tensor stats = at::empty({kStats, tokens}, numbers);
    at::Tensor message = wants_gradient ? at::empty({tokens, 2 * width + stat_columns(x.scalar_type())},
                                                    x.options().requires_grad(false))
                                        : at::empty({0}, numbers);
    in_chunks(chunk_bytes, logits, [&](int64_t from, int64_t count) {
      const at::Tensor wanted = targets.narrow(0, from, count);
      const at::Tensor powers = powers_of(logits.narrow(0, from, count), wanted, first,
                                          stats.narrow(1, from, count), wants_gradient);
      if (!wants_gradient) return;
      const Place place = place_of(wanted, first, weight.size(0));
      at::Tensor into = message.narrow(0, from, count);
      into.narrow(1, 0, width).copy_(kernels::product(powers, weight));
      into.narrow(1, width, width)
          .copy_(weight.index_select(0, place.row.squeeze(1))
                     .masked_fill_(place.here.logical_not().unsqueeze(1), 0.0));
    });
    if (wants_gradient) {
      stats_of(message).copy_(stats.t());
      context->save_for_backward({rows, weight, logits, targets});
      context->saved_data["chunk_bytes"] = chunk_bytes;
      context->saved_data["first"] = first;
    }
    context->mark_non_differentiable({message});
    return {stats, message};
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.vocabulary_part");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &rows = saved[0], &weight = saved[1], &logits = saved[2], &targets = saved[3];
    variable_list result(6);
    if (!is_reached(weight)) return result;
    const bool is_written = logits.size(0) > 0;
    GradTarget target(weight, AddsTo::kFp32Too, is_written ? GradTarget::kAsItIs : GradTarget::kZeroed);
    at::Tensor& into = target.tensor();
    bool adds = target.adds();
    in_chunks(context->saved_data["chunk_bytes"].toInt(), logits, [&](int64_t from, int64_t count) {
      const at::Tensor d_logits =
          logit_gradients(logits.narrow(0, from, count), targets.narrow(0, from, count),
                          context->saved_data["first"].toInt(), grads[0].narrow(1, from, count));
      kernels::matmul(into, d_logits.t(), rows.narrow(0, from, count), {}, adds ? into : at::Tensor());
      adds = true;
    });
    result[1] = target.reported();
    return result;
  }
};

/// The statistics of all parts together, from stats (parts, 3, N).
struct Totals {
  at::Tensor most, sum, wanted;  ///< (N)
  at::Tensor kept;               ///< (N) bool: tokens whose target is not ignored
};

Totals totals_of(const at::Tensor& stats, const at::Tensor& targets) {
  const at::Tensor most = stats.select(1, 0).amax(0);
  Totals totals{.most = most,
                .sum = (stats.select(1, 1) * (stats.select(1, 0) - most).exp_()).sum(0),
                .wanted = stats.select(1, 2).amax(0),
                .kept = targets.reshape({-1}).ne(kernels::kIgnoredTarget)};
  const at::Tensor lost = totals.kept.logical_and(totals.wanted.eq(kNoLogit));
  if (lost.is_cpu() && lost.any().item<bool>()) {
    const int64_t token = lost.nonzero()[0][0].item<int64_t>();
    throw DataError(
        "[nn.cross_entropy] the target of row {} is {}, which no part of the vocabulary has; give classes of "
        "the model, or {} for rows without a loss",
        token, targets.reshape({-1})[token].item<int64_t>(), kernels::kIgnoredTarget);
  }
  return totals;
}

/// The gradient (n, width) of the input, a sum over messages: the first `width` columns times factors (parts,
/// n), and the rest, the target's row, times of_target (n). 0 where scale (n) is, whatever the logits are.
at::Tensor added_up(const std::vector<at::Tensor>& messages, const at::Tensor& factors,
                    const at::Tensor& of_target, const at::Tensor& scale, int64_t width) {
  const at::Tensor& one = messages.front();
  if (one.is_cuda()) {
    at::Tensor gradient = at::empty({one.size(0), width}, one.options());
    if (kernels::join_vocabulary(gradient, messages, factors, of_target, scale)) return gradient;
  }
  at::Tensor sum = at::zeros({one.size(0), width}, factors.options());
  for (size_t part = 0; part < messages.size(); ++part) {
    sum.addcmul_(messages[part].narrow(1, 0, width).to(at::kFloat),
                 factors[static_cast<int64_t>(part)].unsqueeze(1));
    sum.addcmul_(messages[part].narrow(1, width, width).to(at::kFloat), of_target.unsqueeze(1));
  }
  sum.masked_fill_(scale.eq(0.0).unsqueeze(1), 0.0);
  return sum.to(one.scalar_type());
}

/// (N), 0 for ignored targets
at::Tensor losses_of(const Totals& totals) {
  return (totals.most + totals.sum.log() - totals.wanted).masked_fill(totals.kept.logical_not(), 0.0);
}

at::Tensor mean_loss_of(const Totals& totals) {
  return losses_of(totals).sum() / totals.kept.sum(at::kFloat);
}

}  // namespace

VocabularyPart vocabulary_part(const at::Tensor& x, const at::Tensor& weight, int64_t first,
                               const LossTarget& target) {
  TRIREME_CHECK(x.numel() / x.size(-1) == target.targets.numel(),
                "[nn.vocabulary_part] {} tokens, {} targets", x.numel() / x.size(-1), target.targets.numel());
  const bool wants_gradient = at::GradMode::is_enabled();
  const variable_list made =
      VocabularyPartFunction::apply(x, weight, target.targets, first, target.chunk_bytes, wants_gradient);
  return {made[0], wants_gradient ? made[1] : at::Tensor()};
}

JoinedVocabulary join_vocabulary(const std::vector<at::Tensor>& messages, const at::Tensor& targets,
                                 int64_t width, double scale) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> of_parts;
  for (const at::Tensor& message : messages) of_parts.push_back(stats_of(message).t());
  const at::Tensor stats = at::stack(of_parts);
  const Totals totals = totals_of(stats, targets);
  const at::Tensor row_scale =
      totals.kept.to(at::kFloat).mul_(scale) / totals.kept.sum(at::kFloat).clamp_min(1.0);
  const at::Tensor per_sum = row_scale / totals.sum;
  const at::Tensor of_target = ((totals.wanted - totals.most).exp_() / totals.sum).sub_(1.0).mul_(row_scale);
  const at::Tensor factors = (stats.select(1, 0) - totals.most).exp_().mul_(per_sum).contiguous();
  return {mean_loss_of(totals), added_up(messages, factors, of_target, row_scale, width),
          at::stack({totals.most, totals.sum, row_scale})};
}

at::Tensor joined_loss(const at::Tensor& stats, const at::Tensor& targets) {
  return mean_loss_of(totals_of(stats, targets));
}

namespace {

class CutCrossEntropyFunction : public Function<CutCrossEntropyFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& targets_in, int64_t chunk_bytes, double scale,
                            const JointPtr& joint, bool wants_gradient) {
    const InUse in_use{x, weight};
    const at::Tensor rows = joint->gather(x.reshape({-1, x.size(-1)}).contiguous());
    const at::Tensor targets = targets_in.reshape({-1}).contiguous();
    const at::Tensor kept = targets.ne(kernels::kIgnoredTarget);
    const at::Tensor row_scale = kept.to(at::kFloat).mul_(scale) / kept.sum(at::kFloat).clamp_min(1.0);
    at::Tensor d_rows = wants_gradient ? at::empty_like(rows) : at::Tensor();
    at::Tensor d_weight = wants_gradient ? at::empty_like(weight) : at::Tensor();
    if (wants_gradient && rows.size(0) == 0) d_weight.zero_();
    at::Tensor loss = at::zeros({}, x.options().dtype(at::kFloat));
    const int64_t chunk = chunk_of(chunk_bytes, rows, *joint);
    for (int64_t from = 0; from < rows.size(0); from += chunk) {
      const int64_t count = std::min(chunk, rows.size(0) - from);
      const at::Tensor in = rows.narrow(0, from, count), wanted = targets.narrow(0, from, count);
      const at::Tensor logits = kernels::product(in, weight.t());
      const Totals totals = totals_of(stats_of_all(logits, wanted, *joint), wanted);
      loss.add_(losses_of(totals).sum());
      if (!wants_gradient) continue;
      const at::Tensor d_logits =
          logit_gradients(logits, wanted, joint->first_word(),
                          at::stack({totals.most, totals.sum, row_scale.narrow(0, from, count)}), logits);
      at::Tensor d_in = d_rows.narrow(0, from, count);
      kernels::matmul(d_in, d_logits, weight);
      kernels::matmul(d_weight, d_logits.t(), in, {}, from > 0 ? d_weight : at::Tensor());
    }
    if (wants_gradient) {
      const at::Tensor d_x = joint->reduce_scatter(d_rows).to(x.scalar_type()).view(x.sizes());
      context->save_for_backward({weight, d_x, d_weight});
      context->saved_data["scale"] = scale;
    }
    return loss / kept.sum(at::kFloat);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.cut_cross_entropy");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& weight = saved[0];
    const at::Tensor factor = grads[0] / context->saved_data["scale"].toDouble();
    variable_list result(7);
    result[0] = at::empty_like(saved[1]);
    kernels::scale(result[0], saved[1], factor);
    if (!is_reached(weight)) return result;
    GradTarget target(weight, AddsTo::kFp32Too, GradTarget::kAsItIs);
    target.adds() ? kernels::add_scaled(target.tensor(), saved[2], factor)
                  : kernels::scale(target.tensor(), saved[2], factor);
    result[1] = target.reported();
    return result;
  }

 private:
  /// Ranks exchange the numbers of as many rows at a time, and so all cut rows as the largest part has to.
  static int64_t chunk_of(int64_t chunk_bytes, const at::Tensor& rows, const Joint& joint) {
    int64_t most = 1;
    const std::vector<int64_t>& first = joint.vocabulary();
    for (size_t rank = 0; rank + 1 < first.size(); ++rank)
      most = std::max(most, first[rank + 1] - first[rank]);
    return tokens_at_once(chunk_bytes, rows.new_empty({1, 1}).expand({rows.size(0), most}));
  }

  /// (ranks, 3, n)
  static at::Tensor stats_of_all(const at::Tensor& logits, const at::Tensor& targets, const Joint& joint) {
    const at::Tensor stats = at::empty({kStats, logits.size(0)}, logits.options().dtype(at::kFloat));
    powers_of(logits, targets, joint.first_word(), stats, /*wanted=*/false);
    return joint.gather(stats).view({joint.size(), kStats, logits.size(0)});
  }
};

}  // namespace

at::Tensor cut_cross_entropy(const at::Tensor& x, const at::Tensor& weight, const LossTarget& target,
                             const JointPtr& joint) {
  const int64_t rows = x.numel() / x.size(-1) * joint->size();
  TRIREME_CHECK(rows == target.targets.numel(),
                "[nn.cut_cross_entropy] {} rows on {} ranks, but {} targets; each row needs one target", rows,
                joint->size(), target.targets.numel());
  const bool wants_gradient = (x.requires_grad() || weight.requires_grad()) && at::GradMode::is_enabled();
  return CutCrossEntropyFunction::apply(x, weight, target.targets, target.chunk_bytes, target.gradient_scale,
                                        joint, wants_gradient);
}

namespace {

class CutLogitsFunction : public Function<CutLogitsFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits_in,
                            const at::Tensor& targets_in, int64_t chunk_bytes, const JointPtr& joint) {
    const at::Tensor logits = logits_in.reshape({-1, logits_in.size(-1)}).contiguous();
    const at::Tensor targets = targets_in.reshape({-1}).contiguous();
    const int64_t rows = logits.size(0);
    const at::Tensor stats = at::empty({kStats, rows}, logits.options().dtype(at::kFloat));
    in_chunks(chunk_bytes, logits, [&](int64_t from, int64_t count) {
      powers_of(logits.narrow(0, from, count), targets.narrow(0, from, count), joint->first_word(),
                stats.narrow(1, from, count), /*wanted=*/false);
    });
    const Totals totals = totals_of(joint->gather(stats).view({joint->size(), kStats, rows}), targets);
    const at::Tensor kept = totals.kept.to(at::kFloat), scale = kept / kept.sum().clamp_min(1.0);
    context->save_for_backward({logits, targets, at::stack({totals.most, totals.sum, scale})});
    context->saved_data["first"] = joint->first_word();
    context->saved_data["chunk_bytes"] = chunk_bytes;
    context->saved_data["shape"] = logits_in.sizes().vec();
    return mean_loss_of(totals);
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.cut_cross_entropy");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1];
    const at::Tensor totals = saved[2].clone();
    totals[2].mul_(grads[0]);
    const at::Tensor gradient = at::empty_like(logits);
    in_chunks(context->saved_data["chunk_bytes"].toInt(), logits, [&](int64_t from, int64_t count) {
      gradient.narrow(0, from, count)
          .copy_(logit_gradients(logits.narrow(0, from, count), targets.narrow(0, from, count),
                                 context->saved_data["first"].toInt(),
                                 totals.narrow(1, from, count).contiguous()));
    });
    return {gradient.view(context->saved_data["shape"].toIntVector()), {}, {}, {}};
  }
};

}  // namespace

at::Tensor cut_cross_entropy(const at::Tensor& logits, const LossTarget& target, const JointPtr& joint) {
  const int64_t rows = logits.numel() / logits.size(-1);
  TRIREME_CHECK(rows == target.targets.numel(),
                "[nn.cut_cross_entropy] {} rows of logits, but {} targets; each row needs one target", rows,
                target.targets.numel());
  return CutLogitsFunction::apply(logits, target.targets, target.chunk_bytes, joint);
}

}  // namespace trireme::nn
