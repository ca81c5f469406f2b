#pragma once
// Tensors of workers as the bytes that a client has of them.
#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "trireme/plan/ops.h"

namespace trireme::controller {

/// A tensor on the CPU of these bytes, which it copies. Throws DataError for other than its bytes.
at::Tensor tensor_of(std::string_view bytes, const plan::TensorType& type);
/// The elements in row-major order; waits for a GPU.
std::string bytes_of(const at::Tensor& tensor);

}  // namespace trireme::controller
