#pragma once
// Shared by the sources that compute operations on a rank's parts. Private to tensor/*_ops.cpp and
// op_kernels.cpp.
#include <ATen/core/Tensor.h>

#include <vector>

#include "trireme/kernels/counters.h"
#include "trireme/tensor/op_kernels.h"

namespace trireme::tensor::local {

using Tensors = std::vector<at::Tensor>;

/// Results are of this dtype.
at::ScalarType result_type(const OpCall& call);
/// This rank's shape of the first result.
plan::Shape result_shape(const OpCall& call);
/// The places that the elements of this rank's part have in the whole tensor.
kernels::Counters places(const plan::Shape& whole, const plan::TensorPlacement& placement, int64_t ranks,
                         int64_t rank);

// Element by element, sums, and moves of elements (element_ops.cpp).
Tensors created(const OpCall& call, const Tensors& in);
Tensors binary(const OpCall& call, const Tensors& in);
Tensors unary(const OpCall& call, const Tensors& in);
Tensors cast(const OpCall& call, const Tensors& in);
Tensors dropped(const OpCall& call, const Tensors& in);
Tensors chosen(const OpCall& call, const Tensors& in);
Tensors reduced(const OpCall& call, const Tensors& in);
Tensors rearranged(const OpCall& call, const Tensors& in);

// Layers and losses (layer_ops.cpp).
Tensors multiplied(const OpCall& call, const Tensors& in);
Tensors looked_up(const OpCall& call, const Tensors& in);
Tensors attended(const OpCall& call, const Tensors& in);
Tensors softened(const OpCall& call, const Tensors& in);
Tensors normed(const OpCall& call, const Tensors& in);
Tensors mean_loss(const OpCall& call, const Tensors& in);

// Operations that write their operands (update_ops.cpp).
Tensors updated(const OpCall& call, const Tensors& in);

}  // namespace trireme::tensor::local
