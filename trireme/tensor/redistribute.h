#pragma once
// Takes a tensor that the ranks of a group hold together from one placement to another (plan/placement.h),
// forward and backward. Whatever is spread over ranks between two operators goes through here.
#include <ATen/core/Tensor.h>

#include <memory>

#include "trireme/comm/group.h"
#include "trireme/plan/placement.h"

namespace trireme::tensor {

/// In which dtype sums over ranks come: that of the tensor, or unrounded for what is added to them next.
enum class Sums { kRounded, kFp32 };

/// This rank's part of a tensor after it went from one placement to another. Collective over the group where
/// plan::redistribute_bytes() is not 0; every rank passes the same placements, dtype and whole.
///
/// `local` is this rank's part, on the group's device, in any memory layout: a slice of the whole where it is
/// sharded, else of the whole's shape. `whole` is the whole's shape; without it ranks have slices of one
/// size. Slices are those of plan::shard_range(): other sizes are as even as possible, the first ranks have
/// one more, and a rank may have none.
///
/// The result has local's dtype and is contiguous, but where nothing changes, as in a group of one, it is
/// local. It may share local's memory. To the placement `partial`, group rank 0 has the values of a
/// replicated tensor, and the others zeros; each has a sharded one's slice with zeros around it. From it,
/// fp32 and bf16 are summed in fp32 in the fixed tree of Group::reduce_scatter_ordered(), and rounded once:
/// bits do not depend on whether the sum is sharded or replicated, nor along which dimension. With
/// Sums::kFp32, from `partial` to a shard, they are not rounded.
///
/// Evenly sliced and contiguous, `shard(0)` to `replicate` is an all-gather into the result, and `partial` to
/// `shard(0)` an ordered reduce-scatter, without a copy; other dimensions and sizes are copied once or twice.
///
/// Autograd does not see it: the result has no gradient. Throws LogicError, before any communication, for a
/// dimension that local does not have, a shape that is no part of `whole`, and sums of other dtypes;
/// CommError as collectives do.
at::Tensor redistribute(const at::Tensor& local, const plan::TensorPlacement& from,
                        const plan::TensorPlacement& to, comm::Group& group, at::IntArrayRef whole = {},
                        Sums sums = Sums::kRounded);

/// redistribute() into `result`, contiguous, of evenly sliced and contiguous tensors: from `shard(0)` to
/// `replicate`, or from `partial` to `shard(0)` as Sums::kFp32 has it. Throws LogicError for others.
void redistribute_into(at::Tensor& result, const at::Tensor& local, const plan::TensorPlacement& from,
                       const plan::TensorPlacement& to, comm::Group& group);

/// redistribute() for autograd: the value goes from from.value to to.value, and backward takes the gradient
/// from to.gradient to from.gradient. It relies on to.gradient: that the gradients which arrive are held so.
/// Backward is collective, too: all ranks run it, in the same order. Throws LogicError also where value and
/// gradient cannot have one shape, and in a backward pass with create_graph.
at::Tensor redistribute(const at::Tensor& local, const plan::Placed& from, const plan::Placed& to,
                        const std::shared_ptr<comm::Group>& group, at::IntArrayRef whole = {});

}  // namespace trireme::tensor
