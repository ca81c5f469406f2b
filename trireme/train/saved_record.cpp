#include "trireme/train/saved_record.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "trireme/base/text.h"
#include "trireme/checkpoint/strict_json.h"

namespace trireme::train {
namespace {

using Json = nlohmann::json;

/// Numbers of a step that was skipped need not be finite, which JSON cannot say. A NaN has no sign, as it is
/// read.
Json to_json(double value) {
  return std::isfinite(value) ? Json(value) : Json(number_text(value));
}

Json to_json(const std::optional<double>& value) {
  return value ? to_json(*value) : Json();
}

std::optional<double> number_if_any(const Json& json, const char* key, const std::string& path) {
  const Json& value = checkpoint::value_of(json, key, path);
  if (value.is_null()) return std::nullopt;
  if (value.is_number()) return value.get<double>();
  const std::string word = checkpoint::text_of(json, key, path);
  if (word == "inf" || word == "-inf" || word == "nan") return std::strtod(word.c_str(), nullptr);
  checkpoint::fail_json(path, fmt::format("'{}' is not a number", key));
}

double number_of(const Json& json, const char* key, const std::string& path) {
  if (const auto number = number_if_any(json, key, path)) return *number;
  checkpoint::fail_json(path, fmt::format("'{}' is not a number", key));
}

}  // namespace

Json record_to_json(const StepRecord& record) {
  return {{"grad_norm", to_json(record.grad_norm)},
          {"lr", record.lr},
          {"tokens", record.tokens},
          {"tokens_per_s", record.tokens_per_s},
          {"step_ms", record.step_ms},
          {"peak_bytes", record.peak_bytes},
          {"active_bytes", record.active_bytes},
          {"reserved_bytes", record.reserved_bytes},
          {"loss_scale", to_json(record.loss_scale)},
          {"skipped", record.skipped},
          {"communication_ms", to_json(record.communication_ms)},
          {"exposed_ms", to_json(record.exposed_ms)}};
}

StepRecord record_from_json(const Json& json, int64_t step, double loss, const std::string& path) {
  const Json& skipped = checkpoint::value_of(json, "skipped", path);
  if (!skipped.is_boolean()) checkpoint::fail_json(path, "'skipped' is neither true nor false");
  return {.step = step,
          .loss = loss,
          .grad_norm = number_of(json, "grad_norm", path),
          .lr = number_of(json, "lr", path),
          .tokens = checkpoint::count_of(json, "tokens", path),
          .tokens_per_s = number_of(json, "tokens_per_s", path),
          .step_ms = number_of(json, "step_ms", path),
          .peak_bytes = checkpoint::count_of(json, "peak_bytes", path),
          .active_bytes = checkpoint::count_of(json, "active_bytes", path),
          .reserved_bytes = checkpoint::count_of(json, "reserved_bytes", path),
          .loss_scale = number_if_any(json, "loss_scale", path),
          .skipped = skipped.get<bool>(),
          .val_loss = std::nullopt,
          .communication_ms = number_if_any(json, "communication_ms", path),
          .exposed_ms = number_if_any(json, "exposed_ms", path)};
}

}  // namespace trireme::train
