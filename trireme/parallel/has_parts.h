#pragma once
// Which parameters of a module of one's own are parts of larger ones, cut over the ranks along tp: what
// data_parallel() and fully_shard() read, so that files, norms and initial values are those of whole
// parameters.
//
// All other parameters of such a module are copies, one on each of these ranks. Outside of cut layers the
// gradient of a rank is a share, and those of the ranks add up (tensor_layers.h): so the engine adds up the
// gradients of copies, whatever part of the rows or heads a rank has used them for. A parameter over this
// rank's own features, as of a BatchNorm between cut layers, is no copy, and must be named.
#include <map>
#include <string>

#include "trireme/comm/mesh.h"
#include "trireme/plan/part.h"

namespace torch::nn {
class Module;
}

namespace trireme::parallel {

/// A module with parameters that are parts derives from it, as ColumnLinear does.
class HasParts {
 public:
  virtual ~HasParts() = default;
  /// By the names under which this module itself registers them. Those that it leaves out are no parts, nor
  /// are those of its submodules, which answer for themselves.
  virtual std::map<std::string, plan::Part> parts() const = 0;
};

/// By the first name of a parameter within a module.
using Parts = std::map<std::string, plan::Part>;

/// The parts that `module` and its submodules name. Throws LogicError for a part of a parameter that does not
/// exist, one that does not fit what is held, and two for one parameter.
Parts declared_parts(const torch::nn::Module& module);

/// These parts, with the copies on the ranks along mesh.tp. Without any part nothing is a copy.
Parts parts_on(const torch::nn::Module& module, const comm::Mesh& mesh);

/// Throws LogicError, on all ranks alike, unless the parts of the ranks along mesh.tp are each whole
/// parameter, once, copies are those of neighbours, and different parts of one parameter have different
/// values. Every rank has named the same parameters with the same dimensions. Collective over mesh.stage,
/// where there are parts.
void check_cover(const torch::nn::Module& module, const Parts& parts, const comm::Mesh& mesh);

/// Throws LogicError, on all ranks alike, for a buffer that ranks along mesh.tp have different values of,
/// which those of the first rank would take the place of. Every rank has the same buffers in the same order.
/// Collective over mesh.stage, where there are parts.
void check_buffers_alike(const torch::nn::Module& module, const Parts& parts, const comm::Mesh& mesh);

}  // namespace trireme::parallel
