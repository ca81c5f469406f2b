#pragma once
// Operations of plan/ops.h on the parts of tensors that one rank of a group holds, as a plan of
// plan/op_rules.h divides them. Derivatives are libtorch's.
#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/plan/op_rules.h"

namespace trireme::tensor {

at::ScalarType scalar_type_of(plan::TensorDtype dtype);

/// This rank's shape of a tensor of the shape `whole`.
plan::Shape part_shape(plan::Shape whole, const plan::TensorPlacement& placement, int64_t ranks,
                       int64_t rank);

/// An operation as one rank sees it.
struct OpCall {
  plan::Op op = plan::Op::kFull;
  const plan::OpAttributes& attributes;
  const plan::FactorMap& map;
  const plan::OpStrategy& strategy;            ///< operands are placed so, and so are results
  const std::vector<plan::TensorType>& types;  ///< of whole operands
  int64_t ranks = 1, rank = 0;
  c10::Device device = c10::kCPU;
};

/// This rank's part of each result; none for an operation that writes its operands, which it does unseen by
/// autograd: operand 0, and those behind operand 1. Others are differentiable in every floating operand, and
/// each result depends on each of them on every rank, also on one that has no elements, so that all ranks
/// take the same way back. A result may share memory with an operand: reshapes, slices and transposes are
/// views, as in torch.
///
/// Random numbers depend on the seed and an element's place in the whole tensor alone. Means are over the
/// whole, so they are partial where ranks share it out. Throws LogicError for operands that are no such
/// parts, DataError on a CPU for rows of a table and classes that do not exist; on a GPU, whose values the
/// host does not see, what they lead to becomes NaN.
std::vector<at::Tensor> run_op(const OpCall& call, const std::vector<at::Tensor>& inputs);

/// An operation as all ranks of a group run it.
struct PlannedOp {
  plan::Op op = plan::Op::kFull;
  const plan::OpAttributes& attributes;
  const plan::OpPlan& plan;
  const std::vector<plan::TensorType>& types;  ///< of whole operands
  c10::Device device = c10::kCPU;
};

/// A tensor outside operations: its gradient is placed as it is, but whole for terms of a sum, since the
/// gradient of a term is that of the sum.
plan::Placed held(const plan::TensorPlacement& placement);

/// run_op() between the plan's moves: operands come as the plan found them, results leave as plan.results(),
/// and so do gradients the other way, as held() says. Collective over `group` (nullptr: one rank) where the
/// plan moves something, and backward where a gradient moves; moves forward send plan.bytes(). All ranks ask
/// for gradients of the same operands.
std::vector<at::Tensor> run_planned(const PlannedOp& planned, const std::vector<at::Tensor>& inputs,
                                    const std::shared_ptr<comm::Group>& group);

}  // namespace trireme::tensor
