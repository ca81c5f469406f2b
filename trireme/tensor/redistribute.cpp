#include "trireme/tensor/redistribute.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <utility>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::tensor {
namespace {

using comm::Group;
using plan::Placed;
using plan::Range;
using plan::Shape;
using plan::shard_range;
using plan::TensorPlacement;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// A redistribution of a tensor of the shape `whole`.
struct Move {
  TensorPlacement from, to;
  Shape whole;

  Range slice(int64_t dim, const Group& group) const {
    return shard_range(whole[static_cast<size_t>(dim)], group.size(), group.rank());
  }
  std::string in_words() const {
    return fmt::format("{} -> {} of ({})", plan::to_text(from), plan::to_text(to), fmt::join(whole, ", "));
  }
};

/// Contiguous, with zeros behind the elements along `dim` up to `size`.
at::Tensor padded(const at::Tensor& slice, int64_t dim, int64_t size) {
  if (slice.size(dim) == size) return slice.contiguous();
  Shape padding(2 * static_cast<size_t>(slice.dim() - dim), 0);  // of the last dimension first
  padding.back() = size - slice.size(dim);
  return at::constant_pad_nd(slice, padding).contiguous();
}

/// The slices of all ranks, each padded to the longest: (..., size, ...) -> (ranks, ..., longest, ...),
/// contiguous. Even slices along the first dimensions are a view.
at::Tensor cut(const at::Tensor& whole, int64_t dim, int64_t ranks) {
  const int64_t size = whole.size(dim), longest = shard_range(size, ranks, 0).size();
  if (size % ranks == 0) return whole.unflatten(dim, {ranks, longest}).movedim(dim, 0).contiguous();
  std::vector<at::Tensor> slices;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Range range = shard_range(size, ranks, rank);
    slices.push_back(padded(whole.narrow(dim, range.begin, range.size()), dim, longest));
  }
  return at::stack(slices);
}

/// The inverse of cut(), for a dimension of `size`.
at::Tensor joined(const at::Tensor& slices, int64_t dim, int64_t size) {
  const int64_t ranks = slices.size(0);
  if (size % ranks == 0) return slices.movedim(0, dim).flatten(dim, dim + 1).contiguous();
  std::vector<at::Tensor> parts;
  for (int64_t rank = 0; rank < ranks; ++rank)
    parts.push_back(slices[rank].narrow(dim, 0, shard_range(size, ranks, rank).size()));
  return at::cat(parts, dim);
}

at::Tensor gather(const at::Tensor& slice, int64_t dim, int64_t size, Group& group) {
  const at::Tensor mine = padded(slice, dim, shard_range(size, group.size(), 0).size());
  Shape shape = mine.sizes().vec();
  shape.insert(shape.begin(), group.size());
  at::Tensor slices = at::empty(shape, mine.options());
  group.all_gather(slices, mine);
  return joined(slices, dim, size);
}

at::Tensor reduce_scatter(const at::Tensor& partial, int64_t dim, Group& group, Sums sums = Sums::kRounded) {
  const at::Tensor slices = cut(partial, dim, group.size());
  at::Tensor sum = at::empty(slices.sizes().slice(1), slices.options().dtype(at::kFloat));
  group.reduce_scatter_ordered(sum, slices);
  const int64_t mine = shard_range(partial.size(dim), group.size(), group.rank()).size();
  const at::ScalarType dtype = sums == Sums::kFp32 ? at::kFloat : partial.scalar_type();
  return sum.narrow(dim, 0, mine).to(dtype).contiguous();
}

/// The sum's elements are the same however they are cut, so they are cut as a flat tensor.
at::Tensor all_reduce(const at::Tensor& partial, Group& group) {
  const at::Tensor flat = partial.reshape({-1});
  return gather(reduce_scatter(flat, 0, group), 0, flat.numel(), group).view(partial.sizes());
}

/// From slices along move.from.dim to slices along move.to.dim.
at::Tensor exchange(const at::Tensor& slice, const Move& move, Group& group) {
  const int64_t from = move.from.dim, to = move.to.dim, size = move.whole[static_cast<size_t>(from)];
  const at::Tensor mine = padded(slice, from, shard_range(size, group.size(), 0).size());
  const at::Tensor sent = cut(mine, to, group.size());
  at::Tensor received = at::empty_like(sent);
  group.all_to_all(received, sent);
  return joined(received.narrow(to + 1, 0, move.slice(to, group).size()), from, size);
}

at::Tensor own_slice(const at::Tensor& whole, const Move& move, Group& group) {
  const Range range = move.slice(move.to.dim, group);
  return whole.narrow(move.to.dim, range.begin, range.size()).contiguous();
}

at::Tensor with_zeros_around(const at::Tensor& slice, const Move& move, Group& group) {
  const Range range = move.slice(move.from.dim, group);
  at::Tensor whole = at::zeros(move.whole, slice.options());
  whole.narrow(move.from.dim, range.begin, range.size()).copy_(slice);
  return whole;
}

at::Tensor moved(const at::Tensor& local, const Move& move, Group& group, Sums sums = Sums::kRounded) {
  if (move.from == move.to || group.size() == 1) {
    const bool summed = move.from.is_partial() && move.to.is_shard();
    return summed && sums == Sums::kFp32 ? local.to(at::kFloat) : local;
  }
  if (move.from.is_replicate()) {
    if (move.to.is_shard()) return own_slice(local, move, group);
    return group.rank() == 0 ? local.contiguous() : at::zeros(move.whole, local.options());
  }
  if (move.to.is_partial()) return with_zeros_around(local, move, group);
  const comm::Subject subject(group, move.in_words());
  if (move.from.is_partial())
    return move.to.is_shard() ? reduce_scatter(local, move.to.dim, group, sums) : all_reduce(local, group);
  if (move.to.is_shard()) return exchange(local, move, group);
  return gather(local, move.from.dim, move.whole[static_cast<size_t>(move.from.dim)], group);
}

/// Throws LogicError unless the group can sum what the move sums.
void check_sum(const at::Tensor& local, const Move& move, const Group& group) {
  const at::ScalarType dtype = local.scalar_type();
  if (!move.from.is_partial() || move.to.is_partial() || dtype == at::kFloat || dtype == at::kBFloat16)
    return;
  throw LogicError(
      "[tensor.redistribute] {} is a sum over ranks, but the tensor is {} on rank {} of group {}; convert it "
      "to fp32 or bf16",
      move.in_words(), c10::toString(dtype), group.rank(), group.name());
}

/// What is asked for, where it can be; else LogicError.
Move checked(const at::Tensor& local, const TensorPlacement& from, const TensorPlacement& to,
             const Group& group, at::IntArrayRef whole) {
  const auto refuse = [&](const std::string& why) {
    throw LogicError("[tensor.redistribute] {} -> {} of a local tensor ({}) on rank {} of {} of group {}: {}",
                     plan::to_text(from), plan::to_text(to), fmt::join(local.sizes(), ", "), group.rank(),
                     group.size(), group.name(), why);
  };
  for (const TensorPlacement& placement : {from, to}) {
    if (!placement.is_shard() || (0 <= placement.dim && placement.dim < local.dim())) continue;
    refuse(fmt::format("{} names no dimension of a tensor that has {}; they count from 0",
                       plan::to_text(placement), local.dim()));
  }
  Move move = {from, to, whole.vec()};
  if (whole.empty()) {
    move.whole = local.sizes().vec();
    if (from.is_shard()) move.whole[static_cast<size_t>(from.dim)] *= group.size();
  }
  Shape part = move.whole;
  if (from.is_shard() && from.dim < std::ssize(part))
    part[static_cast<size_t>(from.dim)] = move.slice(from.dim, group).size();
  if (local.sizes() != at::IntArrayRef(part)) {
    refuse(fmt::format("{} of ({}) has ({}) on this rank; pass that part, or the whole's own shape",
                       plan::to_text(from), fmt::join(move.whole, ", "), fmt::join(part, ", ")));
  }
  check_sum(local, move, group);
  return move;
}

/// A tensor and its gradient have one shape, so slices of one are slices of the other.
void check_gradient(const Placed& placed) {
  const bool sharded = placed.value.is_shard() || placed.gradient.is_shard();
  if (!sharded || placed.value == placed.gradient) return;
  throw LogicError(
      "[tensor.redistribute] the value is {} and its gradient {}, but both have one shape on a rank; a "
      "sharded value needs the same placement for its gradient, others replicate or partial",
      plan::to_text(placed.value), plan::to_text(placed.gradient));
}

/// What backward does, kept in the autograd context.
struct GradientMove : torch::CustomClassHolder {
  GradientMove(Move moves, std::shared_ptr<Group> ranks) : move(std::move(moves)), group(std::move(ranks)) {}
  Move move;
  std::shared_ptr<Group> group;
};

class RedistributeFunction : public Function<RedistributeFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& local, const Move& value,
                            const c10::intrusive_ptr<GradientMove>& gradient) {
    context->saved_data["gradient"] = at::IValue::make_capsule(gradient);
    return moved(local, value, *gradient->group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    if (at::GradMode::is_enabled()) {
      throw LogicError(
          "[tensor.redistribute] backward was called with create_graph=true, but a redistribution has no "
          "second derivative; call backward without create_graph");
    }
    const auto holder = context->saved_data["gradient"].toCapsule();
    const auto& gradient = static_cast<const GradientMove&>(*holder);
    return {moved(grads[0], gradient.move, *gradient.group), {}, {}};
  }
};

}  // namespace

at::Tensor redistribute(const at::Tensor& local, const TensorPlacement& from, const TensorPlacement& to,
                        Group& group, at::IntArrayRef whole, Sums sums) {
  const at::NoGradGuard no_grad;
  return moved(local.detach(), checked(local, from, to, group, whole), group, sums);
}

void redistribute_into(at::Tensor& result, const at::Tensor& local, const TensorPlacement& from,
                       const TensorPlacement& to, Group& group) {
  const at::NoGradGuard no_grad;
  const Move move = checked(local, from, to, group, {});
  const bool gathers = from == TensorPlacement::shard(0) && to.is_replicate(),
             sums = from.is_partial() && to == TensorPlacement::shard(0);
  TRIREME_CHECK(
      (gathers || sums) && move.whole.front() % group.size() == 0 && local.is_contiguous() &&
          result.is_contiguous() &&
          result.numel() * (sums ? group.size() : 1) == local.numel() * (gathers ? group.size() : 1),
      "[tensor.redistribute_into] {} into ({}) on rank {} of group {} is no all-gather and no "
      "reduce-scatter of even slices in contiguous memory; use redistribute()",
      move.in_words(), fmt::join(result.sizes(), ", "), group.rank(), group.name());
  const comm::Subject subject(group, move.in_words());
  if (group.size() == 1) {
    result.copy_(local);
  } else if (gathers) {
    group.all_gather(result, local);
  } else {
    group.reduce_scatter_ordered(result, local);
  }
}

at::Tensor redistribute(const at::Tensor& local, const Placed& from, const Placed& to,
                        const std::shared_ptr<Group>& group, at::IntArrayRef whole) {
  if (!group) throw LogicError("[tensor.redistribute] there is no group; pass that of an axis of the mesh");
  check_gradient(from);
  check_gradient(to);
  const Move value = checked(local, from.value, to.value, *group, whole);
  const Move gradient = {to.gradient, from.gradient, value.whole};
  check_sum(local, gradient, *group);
  if (group->size() == 1 || (value.from == value.to && gradient.from == gradient.to)) return local;
  return RedistributeFunction::apply(local, value, c10::make_intrusive<GradientMove>(gradient, group));
}

}  // namespace trireme::tensor
