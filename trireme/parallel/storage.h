#pragma once
// Freeing and restoring the memory behind tensors whose views others hold: module parameters, and what
// autograd has saved of them, stay valid objects and see the new memory.
#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <unordered_map>
#include <utility>

namespace trireme::parallel {

/// Frees the storage of `tensor`, which must own it whole. Touching its views afterwards throws.
void free_storage(const at::Tensor& tensor);

/// Gives `tensor` memory again, uninitialised; does nothing when it has memory.
void allocate_storage(const at::Tensor& tensor);

bool has_storage(const at::Tensor& tensor);

/// A flat tensor of so many elements that has no memory yet.
at::Tensor without_storage(int64_t count, const at::TensorOptions& options);
/// The part of `flat` from element `offset` on, of `shape`. Its storage may be freed, which views made by
/// operators do not allow.
at::Tensor place_in(const at::Tensor& flat, int64_t offset, at::IntArrayRef shape);

/// Memory that units take turns with. On a GPU the caching allocator does that well; a CPU's heap would give
/// freed blocks of megabytes to small tensors and grow for the next unit, so there they are kept here.
class StoragePool {
 public:
  using Source = std::function<c10::DataPtr(size_t bytes)>;

  /// Tensors get memory from their own allocator.
  explicit StoragePool(bool keeps) : keeps_(keeps) {}
  /// They get pieces that `source` gives, of at least `least` bytes, which the pool keeps. No tensor gets a
  /// piece that is larger than one that would be made for it: a larger tensor will want that.
  StoragePool(Source source, size_t least) : keeps_(true), source_(std::move(source)), least_(least) {}

  /// free_storage() and allocate_storage(), by way of the pool.
  void free(const at::Tensor& tensor);
  void allocate(const at::Tensor& tensor);

 private:
  bool keeps_;
  Source source_;
  size_t least_ = 0;
  std::multimap<size_t, c10::DataPtr> unused_;        ///< by capacity
  std::unordered_map<const void*, size_t> capacity_;  ///< of what is in use
};

}  // namespace trireme::parallel
