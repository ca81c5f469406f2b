#pragma once
// What ranks compare before they go on together, so that what one of them refuses, or has differently, ends
// the call on all of them and nobody waits. Private to parallel/*.cpp.
#include <ATen/core/Tensor.h>

#include <exception>
#include <string>
#include <vector>

#include "trireme/comm/mesh.h"

namespace trireme::parallel {

/// The lines say what must be the same on all ranks of a stage; `refusal` is why this rank does not go on,
/// null: nothing. Collective over mesh.stage. Throws on all ranks as comm::throw_together() when
/// one refuses, and LogicError when lines differ, with the first difference on the ranks that differ from the
/// first one. `operation` as "data_parallel".
void check_alike(const std::vector<std::string>& lines, const std::exception_ptr& refusal,
                 const comm::Mesh& mesh, const char* operation);

/// Ranks along tp that compute one loss of a module that is cut have the same, but for the rounding of its
/// dtype. Collective over mesh.stage. Throws LogicError on all of its ranks when some do not.
void check_same_loss(const at::Tensor& loss, const comm::Mesh& mesh);

}  // namespace trireme::parallel
