#include "trireme/text/chat_value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr int kDeepestValue = 64;

/// One more than `deepest`, that of the deepest part.
int checked_depth(int deepest) {
  if (deepest < kDeepestValue) return deepest + 1;
  throw ConfigError("[text.chat_template] values are nested more than {} deep; use flat ones", kDeepestValue);
}

/// The number that a value is for comparisons; nothing for what is none.
std::optional<double> number_of(const ChatValue& value) {
  if (const auto* flag = value.as<bool>()) return *flag ? 1.0 : 0.0;
  if (const auto* integer = value.as<int64_t>()) return static_cast<double>(*integer);
  if (const auto* number = value.as<double>()) return *number;
  return std::nullopt;
}

bool equal_fields(const ChatFields& left, const ChatFields& right) {
  if (left.size() != right.size()) return false;
  return std::ranges::all_of(left, [&right](const auto& field) {
    const ChatValue* other = find_field(right, field.first);
    return other != nullptr && equal(field.second, *other);
  });
}

/// How deep a part of a value is. What can change has no parts of other values inside it without end.
int depth_of_part(const ChatValue& part) {
  if (part.is<ChatValue::Namespace>() || part.is<ChatValue::Loop>())
    throw ConfigError("[text.chat_template] {} is a part of another value; keep its fields there",
                      part.type_name());
  return part.depth();
}

ChatValue value_of_json(const nlohmann::ordered_json& json, int outside);

ChatValue list_of_json(const nlohmann::ordered_json& json, int outside) {
  ChatList items;
  for (const auto& item : json) items.push_back(value_of_json(item, outside));
  return ChatValue::list(std::move(items));
}

ChatValue mapping_of_json(const nlohmann::ordered_json& json, int outside) {
  ChatFields fields;
  for (const auto& [name, value] : json.items()) fields.emplace_back(name, value_of_json(value, outside));
  return ChatValue::mapping(std::move(fields));
}

/// `outside` is in how many lists and objects it stands.
ChatValue value_of_json(const nlohmann::ordered_json& json, int outside) {
  if (json.is_null()) return ChatValue::none();
  if (json.is_boolean()) return ChatValue::flag(json.get<bool>());
  if (json.is_number_unsigned() && json.get<uint64_t>() > uint64_t{INT64_MAX})
    throw ConfigError("[text.chat_template] the number {} is too large; write it as text", json.dump());
  if (json.is_number_integer()) return ChatValue::integer(json.get<int64_t>());
  if (json.is_number()) return {ChatValue::Variant(json.get<double>())};
  if (json.is_string()) return ChatValue::text(json.get<std::string>());
  const int inside = checked_depth(outside);
  return json.is_array() ? list_of_json(json, inside) : mapping_of_json(json, inside);
}

/// The digits of 1.5e+16 as Python groups them: an exponent outside [-4, 16) stays, others are written out.
std::string in_pythons_style(std::string_view scientific) {
  const size_t mark = scientific.find('e');
  int exponent = 0;
  const size_t digits_begin = mark + (scientific[mark + 1] == '+' ? 2 : 1);
  std::from_chars(scientific.data() + digits_begin, scientific.data() + scientific.size(), exponent);
  if (exponent < -4 || exponent >= 16) return std::string(scientific);
  std::string sign, digits;
  for (const char c : scientific.substr(0, mark)) {
    if (c == '-') sign = "-";
    if (c >= '0' && c <= '9') digits += c;
  }
  if (exponent < 0) return sign + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

}  // namespace

ChatValue ChatValue::list(ChatList items, bool is_tuple) {
  int deepest = 0;
  for (const ChatValue& item : items) deepest = std::max(deepest, depth_of_part(item));
  return {List{std::make_shared<const ChatList>(std::move(items)), is_tuple, checked_depth(deepest)}};
}

ChatValue ChatValue::mapping(ChatFields fields) {
  int deepest = 0;
  for (const auto& [name, value] : fields) deepest = std::max(deepest, depth_of_part(value));
  return {Mapping{std::make_shared<const ChatFields>(std::move(fields)), checked_depth(deepest)}};
}

int ChatValue::depth() const {
  if (const auto* list = as<List>()) return list->depth;
  if (const auto* mapping = as<Mapping>()) return mapping->depth;
  return 0;
}

bool ChatValue::truthy() const {
  if (is_undefined() || is<None>()) return false;
  if (const auto number = number_of(*this)) return *number != 0.0;
  if (const std::string* content = string()) return !content->empty();
  if (const ChatList* list = items()) return !list->empty();
  if (const ChatFields* mapping = fields()) return !mapping->empty();
  return true;
}

std::string_view ChatValue::type_name() const {
  constexpr std::array<std::string_view, std::variant_size_v<Variant>> kNames = {
      "undefined", "none",      "a truth value", "a whole number", "a number", "a string",
      "a list",    "a mapping", "a namespace",   "a macro",        "a loop",   "a function"};
  return kNames[value_.index()];
}

const ChatValue* find_field(const ChatFields& fields, std::string_view name) {
  const auto found = std::ranges::find(fields, name, &ChatFields::value_type::first);
  return found == fields.end() ? nullptr : &found->second;
}

void set_field(ChatFields& fields, std::string_view name, ChatValue value) {
  const auto found = std::ranges::find(fields, name, &ChatFields::value_type::first);
  if (found == fields.end()) {
    fields.emplace_back(name, std::move(value));
  } else {
    found->second = std::move(value);
  }
}

ChatValue chat_value_of(const nlohmann::ordered_json& json) {
  return value_of_json(json, 0);
}

bool equal(const ChatValue& left, const ChatValue& right) {
  const auto left_number = number_of(left), right_number = number_of(right);
  if (left.is<int64_t>() && right.is<int64_t>()) return *left.as<int64_t>() == *right.as<int64_t>();
  if (left_number && right_number) return *left_number == *right_number;
  if (left.string() && right.string()) return *left.string() == *right.string();
  if (left.fields() && right.fields()) return equal_fields(*left.fields(), *right.fields());
  if (left.items() && right.items()) {
    const bool same_kind = left.as<ChatValue::List>()->is_tuple == right.as<ChatValue::List>()->is_tuple;
    return same_kind && std::ranges::equal(*left.items(), *right.items(), equal);
  }
  const bool both_none = left.is<ChatValue::None>() && right.is<ChatValue::None>();
  return both_none || (left.is_undefined() && right.is_undefined());
}

std::string python_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 40> buffer{};
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific).ptr;
  return in_pythons_style({buffer.data(), static_cast<size_t>(end - buffer.data())});
}

int64_t count_code_points(std::string_view text) {
  return static_cast<int64_t>(count_characters(text));
}

std::string_view code_points(std::string_view text, int64_t begin, int64_t end) {
  size_t at = 0;
  int64_t index = 0;
  for (; index < begin; ++index) at += character_length(text[at]);
  const size_t first = at;
  for (; index < end; ++index) at += character_length(text[at]);
  return text.substr(first, at - first);
}

}  // namespace trireme::text
