#pragma once
// Notices when an operator is about to use a parameter, in forward and in backward, so that parameters of any
// module can be gathered without a line in the module. It works by a dispatch key of its own on the marked
// tensors and their views (torch's DeferredInit, made for libraries outside torch). What reads memory behind
// the dispatcher's back, such as a kernel on data_ptr(), is not seen.
#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace trireme::parallel {

/// Called before an operator runs, on its thread, with the tokens of the marked storages among its arguments,
/// each once. May give the storages memory; must not use marked tensors itself.
using Touched = std::function<void(const std::vector<size_t>& tokens)>;

/// Marks tensors as long as it lives.
class TouchWatch {
 public:
  explicit TouchWatch(Touched touched);
  ~TouchWatch();
  TouchWatch(const TouchWatch&) = delete;
  TouchWatch& operator=(const TouchWatch&) = delete;

  /// From now on operators on `tensor`, or on views made of it from now on, report `token`.
  void mark(const at::Tensor& tensor, size_t token);

 private:
  Touched touched_;
  std::vector<at::Tensor> marked_;
};

}  // namespace trireme::parallel
