#pragma once
// Whether tensors are the weights of a model, before anything is read or started.
#include <string>
#include <vector>

#include "trireme/checkpoint/source.h"
#include "trireme/plan/model_facts.h"

namespace trireme::checkpoint {

/// Names of a model's parameters in the order of its units.
std::vector<std::string> parameter_names(const plan::ModelFacts& facts);

/// Throws DataError naming parameters and buffers that are missing, tensors that have other shapes than in
/// the model (with both shapes), that are no floating-point numbers (a count: no whole number) and, without
/// `may_have_more`, that the model does not have. State of an optimizer is ignored.
void check_fit(const Source& source, const plan::ModelFacts& facts, bool may_have_more = false);

}  // namespace trireme::checkpoint
