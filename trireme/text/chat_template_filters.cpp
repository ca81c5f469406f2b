#include "trireme/text/chat_template_filters.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <system_error>

#include "trireme/base/error.h"
#include "trireme/text/chat_template_methods.h"
#include "trireme/text/chat_template_operators.h"

namespace trireme::text {
namespace {

using Filter = ChatValue (*)(ChatContext&, const ChatValue&, const ChatCall&);

ChatValue apply_trim(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "trim", call, {"chars"});
  return context.made_text(stripped(context, context.text_of(value), given.get(0), true, true));
}

ChatValue apply_tojson(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  return ChatValue::text(chat_json(context, value, call));
}

ChatValue apply_length(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "length", call, {});
  if (value.is_undefined()) return ChatValue::integer(0);
  if (const std::string* text = value.string()) return ChatValue::integer(count_code_points(*text));
  if (value.items() != nullptr) return ChatValue::integer(static_cast<int64_t>(value.items()->size()));
  if (value.fields() == nullptr) context.refuse(fmt::format("length gets {}", value.type_name()));
  return ChatValue::integer(static_cast<int64_t>(value.fields()->size()));
}

ChatValue apply_upper(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "upper", call, {});
  return context.made_text(upper_text(context, context.text_of(value)));
}

ChatValue apply_lower(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "lower", call, {});
  return context.made_text(lower_text(context, context.text_of(value)));
}

ChatValue apply_capitalize(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "capitalize", call, {});
  return context.made_text(capitalized(context, context.text_of(value)));
}

/// Each word with a capital; Jinja2 lets words begin behind spaces, dashes and opening brackets.
ChatValue apply_title(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "title", call, {});
  constexpr std::string_view kBefore = "-({[< \t\n\r\f\v\x1c\x1d\x1e\x1f";
  std::string text = capitalized(context, context.text_of(value));
  for (size_t i = 1; i < text.size(); ++i) {
    const bool begins = kBefore.find(text[i - 1]) != std::string_view::npos;
    if (begins) text[i] = upper_text(context, text.substr(i, 1))[0];
  }
  return context.made_text(std::move(text));
}

ChatValue apply_join(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "join", call, {"d", "attribute"});
  const std::string separator = given.get(0) == nullptr ? "" : context.text_of(*given.get(0));
  std::string text;
  bool is_first = true;
  for (const ChatValue& item : context.items_of(value)) {
    if (!std::exchange(is_first, false)) text += separator;
    text += context.text_of(given.get(1) == nullptr ? item : item_of(context, item, *given.get(1)));
    context.spend(separator.size());
  }
  return context.made_text(std::move(text));
}

ChatValue apply_default(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "default", call, {"default_value", "boolean"});
  const bool is_missing = value.is_undefined() || (given.flag(1) && !value.truthy());
  if (!is_missing) return value;
  return given.get(0) == nullptr ? ChatValue::text("") : *given.get(0);
}

ChatValue apply_list(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "list", call, {});
  return context.made_list(context.items_of(value));
}

ChatValue apply_first(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "first", call, {});
  const ChatList items = context.items_of(value);
  return items.empty() ? ChatValue(ChatUndefined{"the first item"}) : items.front();
}

ChatValue apply_last(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "last", call, {});
  const ChatList items = context.items_of(value);
  return items.empty() ? ChatValue(ChatUndefined{"the last item"}) : items.back();
}

/// The attribute `path`, with dots between steps, each of which may find `fallback` instead.
ChatValue attribute_at(ChatContext& context, ChatValue value, const ChatValue& path,
                       const ChatValue* fallback = nullptr) {
  const auto step = [&](const ChatValue& key) {
    value = item_of(context, value, key);
    if (value.is_undefined() && fallback != nullptr) value = *fallback;
  };
  if (path.string() == nullptr) {
    step(path);
    return value;
  }
  std::string_view rest = *path.string();
  while (true) {
    const size_t dot = rest.find('.');
    step(ChatValue::text(std::string(rest.substr(0, dot))));
    if (dot == std::string_view::npos) return value;
    rest.remove_prefix(dot + 1);
  }
}

/// `call` without its first arguments.
ChatCall after(const ChatCall& call, size_t count) {
  ChatCall rest = call;
  rest.positional.erase(rest.positional.begin(), rest.positional.begin() + static_cast<int64_t>(count));
  return rest;
}

ChatValue mapped_attribute(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "map", call, {"attribute", "default"});
  ChatList mapped;
  for (const ChatValue& item : context.items_of(value)) {
    mapped.push_back(attribute_at(context, item, given.need(0), given.get(1)));
  }
  return context.made_list(std::move(mapped));
}

ChatValue apply_map(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  if (call.positional.empty()) return mapped_attribute(context, value, call);
  const std::string name = context.string(call.positional[0], "map");
  if (!is_chat_filter(name) || name == "map")
    context.refuse(fmt::format("map does not take the filter '{}'", name));
  const ChatCall rest = after(call, 1);
  ChatList mapped;
  for (const ChatValue& item : context.items_of(value)) {
    mapped.push_back(apply_chat_filter(context, name, item, rest));
  }
  return context.made_list(std::move(mapped));
}

ChatValue selected(ChatContext& context, const ChatValue& value, const ChatCall& call, bool by_attribute,
                   bool keeps) {
  const size_t skipped = by_attribute ? 1 : 0;
  if (call.positional.size() < skipped) context.refuse("selectattr gets no attribute");
  const bool has_test = call.positional.size() > skipped;
  const std::string test = has_test ? context.string(call.positional[skipped], "select") : "";
  if (has_test && !is_chat_test(test)) context.refuse(fmt::format("there is no test '{}' here", test));
  const ChatCall rest = has_test ? after(call, skipped + 1) : ChatCall();
  ChatList kept;
  for (const ChatValue& item : context.items_of(value)) {
    const ChatValue tested = by_attribute ? attribute_at(context, item, call.positional[0]) : item;
    const bool holds = has_test ? chat_test_holds(context, test, tested, rest) : tested.truthy();
    if (holds == keeps) kept.push_back(item);
  }
  return context.made_list(std::move(kept));
}

ChatValue apply_select(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  return selected(context, value, call, false, true);
}
ChatValue apply_reject(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  return selected(context, value, call, false, false);
}
ChatValue apply_selectattr(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  return selected(context, value, call, true, true);
}
ChatValue apply_rejectattr(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  return selected(context, value, call, true, false);
}

ChatValue apply_string(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "string", call, {});
  return context.made_text(context.text_of(value));
}

ChatValue apply_items(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "items", call, {});
  if (value.is_undefined()) return context.made_list({});
  if (value.fields() == nullptr) context.refuse(fmt::format("items gets {}", value.type_name()));
  return pairs_of(context, *value.fields());
}

/// By key, upper and lower case alike.
ChatValue apply_dictsort(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "dictsort", call, {});
  if (value.fields() == nullptr) context.refuse(fmt::format("dictsort gets {}", value.type_name()));
  std::vector<std::pair<std::string, std::pair<std::string, ChatValue>>> sorted;
  for (const auto& field : *value.fields()) sorted.emplace_back(lower_text(context, field.first), field);
  std::ranges::stable_sort(sorted, {}, [](const auto& entry) { return entry.first; });
  ChatFields fields;
  for (auto& [key, field] : sorted) fields.push_back(std::move(field));
  return pairs_of(context, fields);
}

ChatValue apply_replace(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "replace", call, {"old", "new", "count"});
  const bool counts = given.get(2) != nullptr && !given.get(2)->is<ChatValue::None>();
  return context.made_text(replaced(context, context.text_of(value), context.text_of(given.need(0)),
                                    context.text_of(given.need(1)),
                                    counts ? context.integer(*given.get(2), "replace") : -1));
}

ChatValue apply_int(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  const ChatGiven given(context, "int", call, {"default"});
  if (value.is<int64_t>() || value.is<bool>()) return ChatValue::integer(context.integer(value, "int"));
  const std::string* text = value.string();
  int64_t number = 0;
  const char* end = text == nullptr ? nullptr : text->data() + text->size();
  const auto read = text == nullptr ? std::from_chars_result{nullptr, std::errc::invalid_argument}
                                    : std::from_chars(text->data(), end, number);
  if (read.ec != std::errc() || read.ptr != end)
    context.refuse("int gets what is no whole number of at most 63 bits in decimal digits");
  return ChatValue::integer(number);
}

ChatValue apply_safe(ChatContext& context, const ChatValue& value, const ChatCall& call) {
  return apply_string(context, value, call);
}

constexpr struct {
  std::string_view name;
  Filter apply;
} kFilters[] = {{"trim", apply_trim},
                {"tojson", apply_tojson},
                {"length", apply_length},
                {"count", apply_length},
                {"upper", apply_upper},
                {"lower", apply_lower},
                {"capitalize", apply_capitalize},
                {"title", apply_title},
                {"join", apply_join},
                {"default", apply_default},
                {"d", apply_default},
                {"list", apply_list},
                {"first", apply_first},
                {"last", apply_last},
                {"map", apply_map},
                {"select", apply_select},
                {"reject", apply_reject},
                {"selectattr", apply_selectattr},
                {"rejectattr", apply_rejectattr},
                {"string", apply_string},
                {"items", apply_items},
                {"dictsort", apply_dictsort},
                {"replace", apply_replace},
                {"int", apply_int},
                {"safe", apply_safe}};

/// Tests of one value; nothing: there is none of that name.
std::optional<bool> tested_alone(const std::string& name, const ChatValue& value) {
  const bool is_flag = value.is<bool>(), is_integer = value.is<int64_t>(), is_float = value.is<double>();
  const bool is_sequence = value.string() || value.items() || value.fields() || value.is_undefined();
  if (name == "defined") return !value.is_undefined();
  if (name == "undefined") return value.is_undefined();
  if (name == "none") return value.is<ChatValue::None>();
  if (name == "string") return value.string() != nullptr;
  if (name == "mapping") return value.fields() != nullptr;
  if (name == "iterable" || name == "sequence") return is_sequence;
  if (name == "number") return is_flag || is_integer || is_float;
  if (name == "integer") return is_integer;
  if (name == "float") return is_float;
  if (name == "boolean") return is_flag;
  if (name == "true") return is_flag && value.truthy();
  if (name == "false") return is_flag && !value.truthy();
  if (name == "callable") return value.is<ChatValue::Macro>() || value.is<ChatValue::Function>();
  return std::nullopt;
}

constexpr auto kTestsAlone = std::to_array<std::string_view>(
    {"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer",
     "float", "boolean", "true", "false", "callable", "odd", "even"});

/// Tests that compare with another value, and the operator that each one is.
constexpr struct {
  std::string_view name, operation;
} kComparisons[] = {{"eq", "=="}, {"equalto", "=="},    {"==", "=="},      {"ne", "!="},
                    {"!=", "!="}, {"lt", "<"},          {"lessthan", "<"}, {"<", "<"},
                    {"gt", ">"},  {"greaterthan", ">"}, {">", ">"},        {"le", "<="},
                    {"<=", "<="}, {"ge", ">="},         {">=", ">="},      {"in", "in"}};

const auto* find_comparison(std::string_view name) {
  const auto* const found =
      std::ranges::find_if(kComparisons, [name](const auto& test) { return test.name == name; });
  return found == std::end(kComparisons) ? nullptr : found;
}

}  // namespace

bool is_chat_filter(std::string_view name) {
  return std::ranges::any_of(kFilters, [name](const auto& filter) { return filter.name == name; });
}

std::vector<std::string> chat_filter_names() {
  std::vector<std::string> names;
  for (const auto& filter : kFilters) names.emplace_back(filter.name);
  return names;
}

bool is_chat_test(std::string_view name) {
  return std::ranges::find(kTestsAlone, name) != kTestsAlone.end() || find_comparison(name) != nullptr;
}

std::vector<std::string> chat_test_names() {
  std::vector<std::string> names(kTestsAlone.begin(), kTestsAlone.end());
  for (const auto& test : kComparisons) names.emplace_back(test.name);
  return names;
}

ChatValue apply_chat_filter(ChatContext& context, const std::string& name, const ChatValue& value,
                            const ChatCall& call) {
  const auto* const found =
      std::ranges::find_if(kFilters, [&](const auto& filter) { return filter.name == name; });
  return found->apply(context, value, call);
}

bool chat_test_holds(ChatContext& context, const std::string& name, const ChatValue& value,
                     const ChatCall& call) {
  if (const auto* comparison = find_comparison(name)) {
    const ChatGiven given(context, name, call, {"other"});
    return compare(context, comparison->operation, value, given.need(0));
  }
  const ChatGiven given(context, name, call, {});
  if (const auto result = tested_alone(name, value)) return *result;
  return (context.integer(value, name) % 2 != 0) == (name == "odd");
}

}  // namespace trireme::text
