#include "trireme/tensor/op_kernels.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/tensor/local_ops.h"
#include "trireme/tensor/redistribute.h"

namespace trireme::tensor {
namespace {

using local::Tensors;
using plan::Op;
using plan::OpMove;
using plan::TensorType;

/// The kernels of the operations up to `last`, from behind those of the line before.
struct KernelsUpTo {
  Op last;
  Tensors (*run)(const OpCall& call, const Tensors& in);
};
constexpr KernelsUpTo kOpKernels[] = {
    {Op::kArange, local::created},      {Op::kGe, local::binary},          {Op::kSilu, local::unary},
    {Op::kCast, local::cast},           {Op::kDropout, local::dropped},    {Op::kWhere, local::chosen},
    {Op::kMin, local::reduced},         {Op::kCat, local::rearranged},     {Op::kLinear, local::multiplied},
    {Op::kEmbedding, local::looked_up}, {Op::kAttention, local::attended}, {Op::kLogSoftmax, local::softened},
    {Op::kRmsNorm, local::normed},      {Op::kMseLoss, local::mean_loss},  {Op::kAdamw, local::updated}};

const KernelsUpTo& kernel_of(Op op) {
  const auto found =
      std::ranges::find_if(kOpKernels, [op](const KernelsUpTo& kernels) { return op <= kernels.last; });
  TRIREME_CHECK(found != std::end(kOpKernels), "[tensor.op_kernels] {} has no kernel", op);
  return *found;
}

std::string tensor_text(const at::Tensor& local) {
  return fmt::format("{} ({})", c10::toString(local.scalar_type()), fmt::join(local.sizes(), ", "));
}

void check_operand(const OpCall& call, size_t index, const at::Tensor& local) {
  const TensorType& type = call.types[index];
  const plan::TensorPlacement& placement = call.strategy.inputs[index];
  const plan::Shape shape = part_shape(type.shape, placement, call.ranks, call.rank);
  if (local.sizes() == at::IntArrayRef(shape) && local.scalar_type() == scalar_type_of(type.dtype)) return;
  throw LogicError(
      "[tensor.op_kernels] {} on rank {} of {}: operand {} is {} here, but {} of {} has ({}); pass that part",
      call.op, call.rank, call.ranks, index, tensor_text(local), plan::to_text(placement),
      plan::to_text(type), fmt::join(shape, ", "));
}

void check_operands(const OpCall& call, const Tensors& inputs) {
  TRIREME_CHECK(inputs.size() == call.types.size() && inputs.size() == call.strategy.inputs.size(),
                "[tensor.op_kernels] {} has {} operands here, {} types and {} placements", call.op,
                inputs.size(), call.types.size(), call.strategy.inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) check_operand(call, i, inputs[i]);
}

/// From one placement of value and gradient to another; nothing moves on one rank.
at::Tensor moved(const at::Tensor& local, const plan::Placed& from, const plan::Placed& to,
                 const std::shared_ptr<comm::Group>& group, const plan::Shape& whole) {
  if (!group || group->size() == 1 || from == to) return local;
  if (local.requires_grad() && at::GradMode::is_enabled()) return redistribute(local, from, to, group, whole);
  return from.value == to.value ? local : redistribute(local, from.value, to.value, *group, whole);
}

const OpMove* move_of(const plan::OpPlan& plan, size_t tensor, bool is_result) {
  const auto found = std::ranges::find_if(plan.moves, [=](const OpMove& move) {
    return move.is_result == is_result && move.tensor == static_cast<int64_t>(tensor);
  });
  return found == plan.moves.end() ? nullptr : &*found;
}

Tensors moved_operands(const PlannedOp& planned, const Tensors& inputs,
                       const std::shared_ptr<comm::Group>& group) {
  const plan::OpStrategy& strategy = planned.plan.strategy;
  Tensors operands;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const OpMove* move = move_of(planned.plan, i, false);
    const plan::TensorPlacement& to = strategy.inputs[i];
    operands.push_back(moved(inputs[i], held(move ? move->from : to),
                             {to, plan::gradient_of_input(strategy, i)}, group, planned.types[i].shape));
  }
  return operands;
}

}  // namespace

at::ScalarType scalar_type_of(plan::TensorDtype dtype) {
  constexpr std::array kTypes = {at::kFloat, at::kBFloat16, at::kHalf, at::kLong, at::kBool};
  static_assert(kTypes.size() == plan::kNames<plan::TensorDtype>.size());
  return kTypes[static_cast<size_t>(dtype)];
}

plan::Shape part_shape(plan::Shape whole, const plan::TensorPlacement& placement, int64_t ranks,
                       int64_t rank) {
  if (!placement.is_shard()) return whole;
  int64_t& size = whole.at(static_cast<size_t>(placement.dim));
  size = plan::shard_range(size, ranks, rank).size();
  return whole;
}

plan::Placed held(const plan::TensorPlacement& placement) {
  return {placement, placement.is_partial() ? plan::TensorPlacement::replicate() : placement};
}

Tensors run_op(const OpCall& call, const Tensors& inputs) {
  check_operands(call, inputs);
  return kernel_of(call.op).run(call, inputs);
}

Tensors run_planned(const PlannedOp& planned, const Tensors& inputs,
                    const std::shared_ptr<comm::Group>& group) {
  const plan::OpPlan& plan = planned.plan;
  TRIREME_CHECK(inputs.size() == planned.types.size() && inputs.size() == plan.strategy.inputs.size(),
                "[tensor.op_kernels] {} has {} operands here, {} types and {} placements", planned.op,
                inputs.size(), planned.types.size(), plan.strategy.inputs.size());
  const int64_t ranks = group ? group->size() : 1, rank = group ? group->rank() : 0;
  Tensors results = run_op(
      {planned.op, planned.attributes, plan.map, plan.strategy, planned.types, ranks, rank, planned.device},
      moved_operands(planned, inputs, group));
  for (size_t i = 0; i < results.size(); ++i) {
    const OpMove* move = move_of(plan, i, true);
    if (move == nullptr) continue;
    const plan::Placed from = {move->from, plan::gradient_of_output(plan.strategy, i)};
    results[i] = moved(results[i], from, held(move->to), group, plan.map.results[i].shape);
  }
  return results;
}

}  // namespace trireme::tensor
