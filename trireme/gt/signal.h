#pragma once
// Scopes of a program, named by signals: where their tensors lie (GT's gt.signal).
#include <string>

#include "trireme/gt/tensor.h"

namespace gt {

namespace signal {

/// Operations in its scope are done by the workers of the signal, and split as it says. Scopes nest; the
/// innermost counts. Throws trireme::ConfigError with the nearest name for one that the file of signals does
/// not have.
class context {
 public:
  explicit context(const std::string& name);
  ~context();
  context(const context&) = delete;
  context& operator=(const context&) = delete;
};

}  // namespace signal

/// The tensor on the workers of the scope, where the document writes `x = x`: a message to other workers. Its
/// gradient goes the way back. On the same workers it only begins a stage. Without a scope it is the tensor.
Tensor here(const Tensor& x, source_location where = source_location::current());

}  // namespace gt
