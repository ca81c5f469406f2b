// DeepSpeed's JSON to keys and values.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "trireme/base/error.h"
#include "trireme/plan/deepspeed_keys.h"

namespace trireme::plan {
namespace {

using DeepSpeedJson = nlohmann::ordered_json;

/// "3:17" of the `byte`-th character, all from 1.
std::string line_and_column(const std::string& text, size_t byte) {
  const std::string before = text.substr(0, byte == 0 ? 0 : byte - 1);
  const size_t line_begin = before.rfind('\n') + 1;
  return fmt::format("{}:{}", std::ranges::count(before, '\n') + 1, before.size() - line_begin + 1);
}

/// Refuses a key that an object has twice, as DeepSpeed does: a parser would keep the last one in silence.
/// And a depth that no file means, before anything walks down into it.
class ShapeCheck {
 public:
  explicit ShapeCheck(const std::string& name) : name_(name) {}

  bool operator()(int depth, DeepSpeedJson::parse_event_t event, DeepSpeedJson& value) {
    constexpr int kDeepest = 16;
    if (depth > kDeepest) {
      throw ConfigError("[plan.deepspeed] {}: values are nested more than {} deep; correct the JSON", name_,
                        kDeepest);
    }
    if (event == DeepSpeedJson::parse_event_t::object_start) keys_.emplace_back();
    if (event == DeepSpeedJson::parse_event_t::object_end) keys_.pop_back();
    if (event == DeepSpeedJson::parse_event_t::key && !keys_.back().insert(value.get<std::string>()).second) {
      throw ConfigError("[plan.deepspeed] {}: '{}' is given twice; remove one", name_,
                        value.get<std::string>());
    }
    return true;
  }

 private:
  const std::string& name_;
  std::vector<std::set<std::string>> keys_;  ///< of the objects that are open
};

DeepSpeedJson parse_json(const std::string& text, const std::string& name) {
  try {
    ShapeCheck check(name);
    constexpr bool kThrows = true, kIgnoresComments = true;
    DeepSpeedJson root = DeepSpeedJson::parse(text, check, kThrows, kIgnoresComments);
    if (root.is_object()) return root;
  } catch (const DeepSpeedJson::parse_error& error) {
    const std::string_view what = error.what();
    const size_t cause = what.find("syntax error");
    throw ConfigError("[plan.deepspeed] {}:{}: {}; correct the JSON", name, line_and_column(text, error.byte),
                      what.substr(cause == std::string_view::npos ? 0 : cause));
  } catch (const DeepSpeedJson::exception& error) {
    throw ConfigError("[plan.deepspeed] {}: {}; correct the JSON", name, error.what());
  }
  throw ConfigError("[plan.deepspeed] {}: the file is no JSON object; put its keys between {{ and }}", name);
}

/// Whole numbers without a point, also those that were written as 5e8.
std::string text_of(const DeepSpeedJson& value) {
  constexpr double kExact = 9007199254740992.0;
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_float()) {
    const auto number = value.get<double>();
    if (number == std::floor(number) && std::fabs(number) < kExact)
      return std::to_string(static_cast<int64_t>(number));
  }
  return value.dump();
}

DeepSpeedType type_of(const DeepSpeedJson& value, const std::string& text) {
  const auto is_number = [](const DeepSpeedJson& one) { return one.is_number(); };
  if (value.is_boolean()) return DeepSpeedType::kFlag;
  if (value.is_string()) return DeepSpeedType::kWord;
  if (value.is_array() && std::ranges::all_of(value, is_number)) return DeepSpeedType::kNumbers;
  if (!value.is_number()) return DeepSpeedType::kAny;
  return text.find_first_not_of("-0123456789") == std::string::npos ? DeepSpeedType::kWhole
                                                                    : DeepSpeedType::kNumber;
}

DeepSpeedValue value_at(const std::string& key, const DeepSpeedJson& value) {
  DeepSpeedValue found{.key = key, .text = text_of(value)};
  found.type = type_of(value, found.text);
  if (value.is_number()) found.number = value.get<double>();
  if (found.type == DeepSpeedType::kNumbers) found.numbers = value.get<std::vector<double>>();
  found.open = value.is_null() || found.text == "auto";
  return found;
}

void add_values(const DeepSpeedJson& object, const std::string& prefix, std::vector<DeepSpeedValue>& values) {
  for (const auto& [word, value] : object.items()) {
    if (value.is_object() && !value.empty())
      add_values(value, prefix + word + ".", values);
    else
      values.push_back(value_at(prefix + word, value));
  }
}

}  // namespace

std::vector<DeepSpeedValue> read_deepspeed_values(const std::string& text, const std::string& name) {
  std::vector<DeepSpeedValue> values;
  add_values(parse_json(text, name), "", values);
  return values;
}

}  // namespace trireme::plan
