#pragma once
// The parameters of a torch module as the engine sees them: one for each tensor, however often it is
// registered.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme::parallel {

struct ModuleParameter {
  std::string name;                  ///< the first under which the module lists it
  std::vector<std::string> aliases;  ///< its other names: a tensor or a submodule registered twice
  at::Tensor tensor;
};

/// In the order in which the module lists them.
std::vector<ModuleParameter> module_parameters(const torch::nn::Module& module);

/// Throws LogicError with both names when two different parameters, or a parameter and a buffer, overlap in
/// memory: an update of one would not reach the other.
void check_separate_memory(const torch::nn::Module& module);

/// Throws LogicError that names a parameter whose memory a tensor has that the module does not register: a
/// view or a detached copy that somebody keeps. It would have the values of before for ever, once the
/// parameter is given other memory. Other handles of the same tensor are none. `operation` as
/// "parallel.load".
void check_no_other_holder(const torch::nn::Module& module, const char* operation);

/// Throws LogicError unless each element of `tensor`, called `name`, has memory of its own, which tensors
/// made by expand() do not have: nothing can be written to these. `operation` as "parallel.load".
void check_writable(const std::string& name, const at::Tensor& tensor, const char* operation);

}  // namespace trireme::parallel
