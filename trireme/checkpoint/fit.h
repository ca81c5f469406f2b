#pragma once
// Whether tensors are the weights of a model, before anything is read or started.
#include <string>
#include <vector>

#include "trireme/checkpoint/source.h"
#include "trireme/plan/model_facts.h"

namespace trireme::checkpoint {

/// Names of a model's parameters in the order of its units.
std::vector<std::string> parameter_names(const plan::ModelFacts& facts);

/// Throws DataError naming tensors that are missing, that the model has in other shapes, with both, that are
/// no floating-point numbers, and, unless they may be there, that it does not have. What an optimizer keeps
/// does not count.
void check_fit(const Source& source, const plan::ModelFacts& facts, bool may_have_more = false);

}  // namespace trireme::checkpoint
