#include "trireme/text/chat_template_operators.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "trireme/base/error.h"
#include "trireme/text/chat_template_methods.h"

namespace trireme::text {
namespace {

constexpr size_t kLargestText = size_t{1} << 26;

bool is_integer(const ChatValue& value) {
  return value.is<int64_t>() || value.is<bool>();
}

bool is_number_value(const ChatValue& value) {
  return is_integer(value) || value.is<double>();
}

double as_double(ChatContext& context, const ChatValue& value) {
  return value.is<double>() ? *value.as<double>() : static_cast<double>(context.integer(value, "a sum"));
}

[[noreturn]] void refuse_operands(const ChatContext& context, std::string_view name, const ChatValue& left,
                                  const ChatValue& right) {
  const auto named = [](const ChatValue& value) {
    const auto* undefined = value.as<ChatUndefined>();
    return undefined == nullptr ? std::string(value.type_name())
                                : fmt::format("undefined ('{}')", undefined->name);
  };
  context.refuse(fmt::format("'{}' is between {} and {}", name, named(left), named(right)));
}

int64_t floor_divided(int64_t left, int64_t right) {
  const int64_t quotient = left / right;
  return left % right != 0 && (left < 0) != (right < 0) ? quotient - 1 : quotient;
}

ChatValue of_integers(ChatContext& context, std::string_view name, int64_t left, int64_t right) {
  int64_t result = 0;
  bool overflows = false;
  if (name == "+") overflows = __builtin_add_overflow(left, right, &result);
  if (name == "-") overflows = __builtin_sub_overflow(left, right, &result);
  if (name == "*") overflows = __builtin_mul_overflow(left, right, &result);
  const bool divides = name == "/" || name == "//" || name == "%";
  if (divides && right == 0) context.refuse("a number is divided by zero");
  if (overflows || (divides && right == -1 && left == INT64_MIN))
    context.refuse("a number has more than 63 bits");
  if (name == "/") return {ChatValue::Variant(static_cast<double>(left) / static_cast<double>(right))};
  if (name == "//") result = floor_divided(left, right);
  if (name == "%") result = left - floor_divided(left, right) * right;
  return ChatValue::integer(result);
}

ChatValue of_doubles(ChatContext& context, std::string_view name, double left, double right) {
  const auto result = [](double value) { return ChatValue(ChatValue::Variant(value)); };
  if (name == "+") return result(left + right);
  if (name == "-") return result(left - right);
  if (name == "*") return result(left * right);
  if (right == 0.0) context.refuse("a number is divided by zero");
  if (name == "/") return result(left / right);
  context.refuse(fmt::format("'{}' is not read between numbers that are not whole", name));
}

ChatValue repeated(ChatContext& context, const std::string& text, int64_t times) {
  std::string whole;
  const size_t count = times > 0 ? static_cast<size_t>(times) : 0;
  if (!text.empty() && count > kLargestText / text.size()) context.refuse("a text is repeated too often");
  for (size_t i = 0; i < count && !text.empty(); ++i) whole += text;
  return context.made_text(std::move(whole));
}

std::optional<ChatValue> sum_of_lists(ChatContext& context, const ChatValue& left, const ChatValue& right) {
  const auto *first = left.as<ChatValue::List>(), *second = right.as<ChatValue::List>();
  if (first == nullptr || second == nullptr || first->is_tuple != second->is_tuple) return std::nullopt;
  ChatList items = context.items_of(left);
  for (ChatValue& item : context.items_of(right)) items.push_back(std::move(item));
  return context.made_list(std::move(items), first->is_tuple);
}

bool contains(ChatContext& context, const ChatValue& whole, const ChatValue& part) {
  if (const std::string* text = whole.string())
    return find_text(context, *text, context.string(part, "'in' a string")) != std::string::npos;
  if (whole.fields() != nullptr) context.spend(whole.fields()->size());
  if (whole.fields() != nullptr)
    return part.string() != nullptr && find_field(*whole.fields(), *part.string()) != nullptr;
  const ChatList items = context.items_of(whole);
  return std::ranges::any_of(items,
                             [&](const ChatValue& item) { return compare(context, "==", item, part); });
}

/// The number of values in it, through all levels; the work of comparing or copying.
void spend_on(ChatContext& context, const ChatValue& value) {
  context.step();
  context.spend(value.string() != nullptr ? value.string()->size() : 0);
  if (value.items() != nullptr) {
    for (const ChatValue& item : *value.items()) spend_on(context, item);
  }
  if (value.fields() != nullptr) {
    for (const auto& [name, field] : *value.fields()) spend_on(context, field);
  }
}

ChatValue loop_attribute(ChatContext& context, const ChatLoop& loop, const std::string& name) {
  const auto length = static_cast<int64_t>(loop.items->size());
  const auto neighbour = [&](int64_t index) {
    return index < 0 || index >= length ? ChatValue(ChatUndefined{name})
                                        : (*loop.items)[static_cast<size_t>(index)];
  };
  if (name == "index") return ChatValue::integer(loop.index + 1);
  if (name == "index0") return ChatValue::integer(loop.index);
  if (name == "revindex") return ChatValue::integer(length - loop.index);
  if (name == "revindex0") return ChatValue::integer(length - loop.index - 1);
  if (name == "first") return ChatValue::flag(loop.index == 0);
  if (name == "last") return ChatValue::flag(loop.index == length - 1);
  if (name == "length") return ChatValue::integer(length);
  if (name == "previtem") return neighbour(loop.index - 1);
  if (name == "nextitem") return neighbour(loop.index + 1);
  context.refuse(fmt::format("loop.{} is not read", name));
}

ChatValue field_or_undefined(ChatContext& context, const ChatFields& fields, const std::string& name) {
  context.spend(fields.size());
  const ChatValue* found = find_field(fields, name);
  return found != nullptr ? *found : ChatValue(ChatUndefined{name});
}

[[noreturn]] void refuse_undefined(const ChatContext& context, const ChatValue& value,
                                   std::string_view name) {
  context.refuse(
      fmt::format("'{}' is asked for '{}', but it is undefined", value.as<ChatUndefined>()->name, name));
}

/// The indices that a slice of `length` items takes, as Python's slice.indices() has them.
std::vector<size_t> sliced(int64_t length, std::optional<int64_t> begin, std::optional<int64_t> end,
                           int64_t step) {
  const int64_t lowest = step > 0 ? 0 : -1, highest = step > 0 ? length : length - 1;
  const auto placed = [&](std::optional<int64_t> at, int64_t otherwise) {
    if (!at) return otherwise;
    return std::clamp(*at < 0 ? std::max(*at, -length - 1) + length : *at, lowest, highest);
  };
  const int64_t first = placed(begin, step > 0 ? lowest : highest),
                last = placed(end, step > 0 ? highest : lowest);
  std::vector<size_t> indices;
  for (int64_t i = first; step > 0 ? i < last : i > last;) {
    indices.push_back(static_cast<size_t>(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return indices;
}

}  // namespace

size_t find_text(ChatContext& context, std::string_view text, std::string_view part, size_t begin) {
  // memmem() takes time in proportion to the text, which std::string::find() does not in all cases.
  if (begin > text.size()) return std::string_view::npos;
  const std::string_view rest = text.substr(begin);
  const void* at = ::memmem(rest.data(), rest.size(), part.data(), part.size());
  const size_t seen =
      at == nullptr ? rest.size() : static_cast<size_t>(static_cast<const char*>(at) - rest.data());
  context.spend(1 + seen + part.size());
  return at == nullptr ? std::string_view::npos : begin + seen;
}

ChatValue arithmetic(ChatContext& context, std::string_view name, const ChatValue& left,
                     const ChatValue& right) {
  if (is_integer(left) && is_integer(right))
    return of_integers(context, name, context.integer(left, "a sum"), context.integer(right, "a sum"));
  if (is_number_value(left) && is_number_value(right))
    return of_doubles(context, name, as_double(context, left), as_double(context, right));
  if (name == "+" && left.string() && right.string()) {
    context.spend(left.string()->size() + right.string()->size());
    return ChatValue::text(*left.string() + *right.string());
  }
  if (name == "*" && left.string() && is_integer(right))
    return repeated(context, *left.string(), context.integer(right, "a repetition"));
  if (name == "*" && right.string() && is_integer(left))
    return repeated(context, *right.string(), context.integer(left, "a repetition"));
  if (name == "+") {
    if (auto sum = sum_of_lists(context, left, right)) return *std::move(sum);
  }
  refuse_operands(context, name, left, right);
}

ChatValue signed_value(ChatContext& context, std::string_view sign, const ChatValue& value) {
  if (value.is<double>())
    return {ChatValue::Variant(sign == "-" ? -*value.as<double>() : *value.as<double>())};
  return of_integers(context, sign, 0, context.integer(value, "a sign"));
}

bool less(ChatContext& context, const ChatValue& left, const ChatValue& right) {
  if (is_integer(left) && is_integer(right))
    return context.integer(left, "'<'") < context.integer(right, "'<'");
  if (is_number_value(left) && is_number_value(right))
    return as_double(context, left) < as_double(context, right);
  if (!left.string() || !right.string()) refuse_operands(context, "<", left, right);
  context.spend(left.string()->size());
  return *left.string() < *right.string();
}

bool compare(ChatContext& context, std::string_view name, const ChatValue& left, const ChatValue& right) {
  if (name == "in") return contains(context, right, left);
  if (name == "not in") return !contains(context, right, left);
  if (name == "<") return less(context, left, right);
  if (name == ">") return less(context, right, left);
  spend_on(context, left);
  if (name == "==") return equal(left, right);
  if (name == "!=") return !equal(left, right);
  const bool is_less = name == "<=" ? less(context, left, right) : less(context, right, left);
  return is_less || equal(left, right);
}

ChatValue attribute_of(ChatContext& context, const ChatValue& value, const std::string& name) {
  if (value.is_undefined()) refuse_undefined(context, value, name);
  if (name.starts_with('_')) context.refuse(fmt::format("the attribute {} is not read", name));
  if (is_chat_method(value, name))
    context.refuse(
        fmt::format("the method {} is not called; put () behind it, or take a field by ['{}']", name, name));
  if (value.fields() != nullptr) return field_or_undefined(context, *value.fields(), name);
  if (const auto* space = value.as<ChatValue::Namespace>())
    return field_or_undefined(context, *space->fields, name);
  if (const auto* loop = value.as<ChatValue::Loop>()) return loop_attribute(context, *loop->loop, name);
  return {ChatUndefined{name}};
}

ChatValue item_of(ChatContext& context, const ChatValue& value, const ChatValue& key) {
  const std::string name = key.string() ? *key.string() : key.is<int64_t>() ? context.text_of(key) : "";
  if (value.is_undefined()) refuse_undefined(context, value, name);
  if (key.is_undefined()) return {ChatUndefined{}};
  if (value.fields() != nullptr && key.string()) return field_or_undefined(context, *value.fields(), name);
  if (is_integer(key) && (value.items() != nullptr || value.string() != nullptr)) {
    const int64_t index = context.integer(key, "an index");
    const int64_t length =
        value.items() ? static_cast<int64_t>(value.items()->size()) : count_code_points(*value.string());
    const int64_t place = index < 0 ? index + length : index;
    if (place < 0 || place >= length) return {ChatUndefined{name}};
    if (value.items() != nullptr) return (*value.items())[static_cast<size_t>(place)];
    context.spend(value.string()->size());
    return ChatValue::text(std::string(code_points(*value.string(), place, place + 1)));
  }
  return key.string() ? attribute_of(context, value, name) : ChatValue(ChatUndefined{name});
}

ChatValue slice_of(ChatContext& context, const ChatValue& value, std::optional<int64_t> begin,
                   std::optional<int64_t> end, std::optional<int64_t> step) {
  if (value.is_undefined()) refuse_undefined(context, value, "a slice");
  if (value.items() == nullptr && value.string() == nullptr) return {ChatUndefined{"a slice"}};
  if (step == 0) context.refuse("the step of a slice is zero");
  const ChatList items = context.items_of(value);
  ChatList kept;
  for (const size_t index : sliced(static_cast<int64_t>(items.size()), begin, end, step.value_or(1))) {
    kept.push_back(items[index]);
  }
  if (value.items() != nullptr)
    return context.made_list(std::move(kept), value.as<ChatValue::List>()->is_tuple);
  std::string text;
  for (const ChatValue& character : kept) text += *character.string();
  return context.made_text(std::move(text));
}

}  // namespace trireme::text
