#include "trireme/nn/ring_attention.h"

#include <ATen/ATen.h>

#include <utility>

#include "trireme/base/error.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/attention_part.h"
#include "trireme/nn/autograd.h"

namespace trireme::nn {
namespace {

using plan::Range;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using RingPtr = std::shared_ptr<const RingContext>;

/// A tensor that goes around the ring.
class Travelling {
 public:
  Travelling(const RingContext& ring, at::Tensor mine) : ring_(ring), here_(std::move(mine)) {}

  /// Until the next arrival this is what was here before.
  const at::Tensor& here() const { return here_; }
  void leave() {
    next_ = at::empty_like(here_);
    arrival_ = ring_.pass_on(here_, next_);
  }
  void arrive() {
    arrival_();
    here_ = std::move(next_);
  }

 private:
  const RingContext& ring_;
  at::Tensor here_, next_;
  RingContext::Arrival arrival_;
};

/// The part that this rank's queries see of the keys that are here after some steps, both of `length` tokens.
struct Visit {
  Range queries, keys;
  bool is_causal = false;
};
Visit visit_after(int64_t step, const plan::TokenSplit& tokens, int64_t length) {
  const Range all{0, length}, earlier{0, length / 2}, later{length / 2, length};
  if (step == 0) return {all, all, true};
  return step <= tokens.rank ? Visit{all, earlier}
                             : Visit{later, all};  // from a rank before this one, or not
}

/// Queries, keys and values of this rank's tokens.
class RankHeads {
 public:
  /// qkv (B, T / n, (heads + 2 kv_heads) * head_dim), rotated.
  RankHeads(const at::Tensor& qkv, const AttentionShape& shape)
      : heads_(shape.heads),
        kv_heads_(shape.kv_heads),
        length_(qkv.size(1)),
        packed_(qkv.unflatten(2, {-1, shape.head_dim})) {}

  int64_t length() const { return length_; }
  at::Tensor queries() const { return packed_.narrow(2, 0, heads_); }
  /// (B, T / n, 2 kv_heads, head_dim), contiguous, to travel.
  at::Tensor keys_and_values() const { return packed_.narrow(2, heads_, 2 * kv_heads_).contiguous(); }
  AttentionPart part(const at::Tensor& keys_and_values, const Visit& visit) const {
    const at::Tensor seen = keys_and_values.narrow(1, visit.keys.begin, visit.keys.size());
    return {queries().narrow(1, visit.queries.begin, visit.queries.size()), seen.narrow(2, 0, kv_heads_),
            seen.narrow(2, kv_heads_, kv_heads_), visit.is_causal};
  }

 private:
  int64_t heads_, kv_heads_, length_;
  at::Tensor packed_;
};

/// Attention over all parts of the keys so far.
class Merged {
 public:
  /// The first part has all queries.
  explicit Merged(const PartOutput& first)
      : output_(first.output.to(at::kFloat).contiguous()), log_sums_(first.log_sums.contiguous()) {}

  void add(const PartOutput& part, const Range& queries) {
    const at::Tensor output = output_.narrow(1, queries.begin, queries.size());
    const at::Tensor log_sums = log_sums_.narrow(2, queries.begin, queries.size());
    const at::Tensor total = at::logaddexp(log_sums, part.log_sums);
    output.mul_(weight(log_sums, total)).add_(part.output * weight(part.log_sums, total));
    log_sums.copy_(total);
  }
  const at::Tensor& output() const { return output_; }      ///< (B, T / n, H, head_dim) fp32
  const at::Tensor& log_sums() const { return log_sums_; }  ///< (B, H, T / n) fp32

 private:
  static at::Tensor weight(const at::Tensor& log_sums, const at::Tensor& total) {
    return (log_sums - total).exp_().transpose(1, 2).unsqueeze(-1);
  }

  at::Tensor output_, log_sums_;
};

Merged attend_around(const RingContext& ring, const RankHeads& heads) {
  Travelling keys(ring, heads.keys_and_values());
  const auto part = [&](const Visit& visit) { return attend(heads.part(keys.here(), visit)); };
  keys.leave();
  Merged merged(part(visit_after(0, ring.tokens(), heads.length())));
  for (int64_t step = 1; step < ring.size(); ++step) {
    keys.arrive();
    if (step + 1 < ring.size()) keys.leave();
    const Visit visit = visit_after(step, ring.tokens(), heads.length());
    merged.add(part(visit), visit.queries);
  }
  return merged;
}

/// The backward pass around the ring. The output of attention, its gradient and the logarithms are those of
/// all keys.
class BackwardAround {
 public:
  BackwardAround(const RingContext& ring, RankHeads heads, at::Tensor d_output, at::Tensor output,
                 at::Tensor log_sums)
      : ring_(ring),
        heads_(std::move(heads)),
        d_output_(std::move(d_output)),
        output_(std::move(output)),
        log_sums_(std::move(log_sums)) {}

  /// (B, T / n, heads + 2 kv_heads, head_dim) fp32. Gradients of keys that are here leave once this rank's
  /// part is added, and meet their keys on the next rank; at last those of its own come back to each rank.
  at::Tensor run() {
    Travelling keys(ring_, heads_.keys_and_values());
    d_query_ = at::zeros(heads_.queries().sizes(), keys.here().options().dtype(at::kFloat));
    keys.leave();
    const at::Tensor own = zeros_for(keys.here());
    add(contribution(0, keys.here()), own);
    keys.arrive();
    Travelling d_keys(ring_, zeros_for(keys.here()));
    for (int64_t step = 1; step < ring_.size(); ++step) {
      const bool is_last = step + 1 == ring_.size();
      if (!is_last) keys.leave();
      const Contribution made = contribution(step, keys.here());
      if (step > 1) d_keys.arrive();
      add(made, d_keys.here());
      d_keys.leave();
      if (!is_last) keys.arrive();
    }
    d_keys.arrive();
    return at::cat({d_query_, own.add_(d_keys.here())}, 2);
  }

 private:
  struct Contribution {
    Visit visit;
    PartGradients gradients;
  };

  static at::Tensor zeros_for(const at::Tensor& keys) {
    return at::zeros(keys.sizes(), keys.options().dtype(at::kFloat));
  }
  Contribution contribution(int64_t step, const at::Tensor& keys) const {
    const Visit visit = visit_after(step, ring_.tokens(), heads_.length());
    const auto [begin, size] = std::pair(visit.queries.begin, visit.queries.size());
    return {visit, attend_backward(heads_.part(keys, visit), d_output_.narrow(1, begin, size),
                                   output_.narrow(1, begin, size), log_sums_.narrow(2, begin, size))};
  }
  void add(const Contribution& made, const at::Tensor& d_keys) {
    const auto& [visit, gradients] = made;
    d_query_.narrow(1, visit.queries.begin, visit.queries.size()).add_(gradients.query);
    const at::Tensor seen = d_keys.narrow(1, visit.keys.begin, visit.keys.size());
    const int64_t kv_heads = gradients.key.size(2);
    seen.narrow(2, 0, kv_heads).add_(gradients.key);
    seen.narrow(2, kv_heads, kv_heads).add_(gradients.value);
  }

  const RingContext& ring_;
  RankHeads heads_;
  at::Tensor d_output_, output_, log_sums_, d_query_;
};

/// Kept in the autograd context.
struct RingHolder : torch::CustomClassHolder {
  explicit RingHolder(RingPtr held) : ring(std::move(held)) {}
  RingPtr ring;
};

void rotate(at::Tensor& packed, const AttentionShape& shape, const RopeTable& rope, float direction) {
  if (!rope.cosine.defined()) return;
  kernels::rope_inplace(packed, rope.cosine, rope.sine, shape.heads + shape.kv_heads, shape.head_dim,
                        direction);
}

class RingFunction : public Function<RingFunction> {
 public:
  /// `rope` for this rank's tokens.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& qkv_in,
                            const std::optional<at::Tensor>& cosine, const std::optional<at::Tensor>& sine,
                            const AttentionShape& shape, KeptAttention* kept,
                            const c10::intrusive_ptr<RingHolder>& holder) {
    const RopeTable rope{cosine.value_or(at::Tensor()), sine.value_or(at::Tensor())};
    at::Tensor qkv = qkv_in.contiguous();
    rotate(qkv, shape, rope, 1.0f);
    const variable_list results = kept_or_computed(kept, [&]() -> variable_list {
      const Merged merged = attend_around(*holder->ring, RankHeads(qkv, shape));
      return {merged.output().flatten(2, 3).to(qkv.scalar_type()), merged.log_sums()};
    });
    context->save_for_backward({qkv, rope.cosine, rope.sine, results[0], results[1]});
    context->saved_data["ring"] = c10::IValue::make_capsule(holder);
    context->saved_data["shape"] = std::vector<int64_t>{shape.heads, shape.kv_heads, shape.head_dim};
    return results[0];
  }

  static variable_list backward(AutogradContext* context, variable_list grads) {
    refuse_create_graph("nn.ring_attention");
    const variable_list saved = context->get_saved_variables();
    const std::vector<int64_t> sizes = context->saved_data["shape"].toIntVector();
    const AttentionShape shape{sizes[0], sizes[1], sizes[2]};
    const auto holder =
        c10::static_intrusive_pointer_cast<RingHolder>(context->saved_data["ring"].toCapsule());
    const at::Tensor& qkv = saved[0];
    const auto by_head = [&](const at::Tensor& x) {
      return x.contiguous().unflatten(2, {shape.heads, shape.head_dim});
    };
    BackwardAround backward(*holder->ring, RankHeads(qkv, shape), by_head(grads[0]), by_head(saved[3]),
                            saved[4]);
    at::Tensor d_qkv = backward.run().flatten(2, 3).to(qkv.scalar_type());
    rotate(d_qkv, shape, {saved[1], saved[2]}, -1.0f);
    return {d_qkv, {}, {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor RingContext::attend(const at::Tensor& qkv, const AttentionShape& shape, const RopeTable& rope,
                               double dropout, KeptAttention* kept, const Documents& documents) const {
  TRIREME_CHECK(!documents.are_apart(),
                "[nn.ring_attention] a ring keeps no documents apart; split tokens with UlyssesContext");
  TRIREME_CHECK(dropout == 0.0, "[nn.ring_attention] dropout of attention weights is {}, but must be 0",
                dropout);
  TRIREME_CHECK(qkv.size(1) % tokens().pieces() == 0,
                "[nn.ring_attention] a rank has {} tokens of a sequence, but for a ring two pieces of one "
                "length; give sequences of a multiple of {} tokens",
                qkv.size(1), size() * tokens().pieces());
  const std::vector<Range> mine = tokens().ranges(qkv.size(1) * size());
  std::optional<at::Tensor> cosine, sine;
  if (rope.cosine.defined()) {
    cosine = rows_of(rope.cosine, mine, 0);
    sine = rows_of(rope.sine, mine, 0);
  }
  return RingFunction::apply(qkv, cosine, sine, shape, kept,
                             c10::make_intrusive<RingHolder>(shared_from_this()));
}

}  // namespace trireme::nn
