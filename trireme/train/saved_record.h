#pragma once
// A step's record in its checkpoint: a run that was killed before it could publish the record publishes it
// when it goes on.
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "trireme/base/sink.h"

namespace trireme::train {

/// What is known of a step when it is saved, but for its number and its loss, which a checkpoint has anyhow.
nlohmann::json record_to_json(const StepRecord& record);
/// The record from that JSON. Throws DataError naming `path` and the key.
StepRecord record_from_json(const nlohmann::json& json, int64_t step, double loss, const std::string& path);

}  // namespace trireme::train
