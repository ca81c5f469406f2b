#pragma once
// Freeing and restoring the memory behind tensors whose views others hold: module parameters, and what
// autograd has saved of them, stay valid objects and see the new memory.
#include <ATen/core/Tensor.h>

namespace trireme::parallel {

/// Frees the storage of `tensor`, which must own it whole. Touching its views afterwards throws.
void free_storage(const at::Tensor& tensor);

/// Gives it memory again, uninitialised; does nothing when it has some.
void allocate_storage(const at::Tensor& tensor);

bool has_storage(const at::Tensor& tensor);

}  // namespace trireme::parallel
