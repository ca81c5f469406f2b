#include "trireme/text/chat_template_functions.h"

#include <algorithm>
#include <array>

#include "trireme/base/error.h"

namespace trireme::text {
namespace {

constexpr int64_t kLongestRange = 100000;
constexpr size_t kFieldBytes = 64;

constexpr auto kFunctions =
    std::to_array<std::string_view>({"range", "namespace", "dict", "raise_exception"});

ChatValue range_of(ChatContext& context, const ChatCall& call) {
  std::array<int64_t, 3> bounds = {0, 0, 1};
  const auto& values = call.positional;
  if (values.empty() || values.size() > bounds.size() || !call.named.empty())
    context.refuse("range takes one to three whole numbers");
  for (size_t i = 0; i < values.size(); ++i) {
    bounds[values.size() == 1 ? 1 : i] = context.integer(values[i], "range");
  }
  const auto [begin, end, step] = bounds;
  if (step == 0) context.refuse("the step of range is zero");
  ChatList items;
  for (int64_t i = begin; step > 0 ? i < end : i > end;) {
    if (static_cast<int64_t>(items.size()) == kLongestRange)
      context.refuse(fmt::format("range has more than {} numbers", kLongestRange));
    items.push_back(ChatValue::integer(i));
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return context.made_list(std::move(items));
}

/// The fields that namespace() and dict() get, from a mapping and by name.
ChatFields fields_of_call(ChatContext& context, const std::string& name, const ChatCall& call) {
  ChatFields fields;
  if (call.positional.size() > 1) context.refuse(fmt::format("{} gets more than one value", name));
  if (!call.positional.empty()) {
    if (call.positional[0].fields() == nullptr) context.refuse(fmt::format("{} gets no mapping", name));
    fields = *call.positional[0].fields();
  }
  for (const auto& [field, value] : call.named) set_field(fields, field, kept_in_namespace(context, value));
  context.spend(kFieldBytes * (1 + fields.size()));
  return fields;
}

}  // namespace

bool is_chat_function(std::string_view name) {
  return std::ranges::find(kFunctions, name) != kFunctions.end();
}

ChatValue call_chat_function(ChatContext& context, const std::string& name, const ChatCall& call) {
  if (name == "range") return range_of(context, call);
  if (name == "raise_exception") {
    const ChatGiven given(context, name, call, {"message"});
    context.refuse(fmt::format("the template refuses the conversation: {}", context.text_of(given.need(0))));
  }
  ChatFields fields = fields_of_call(context, name, call);
  if (name == "dict") return ChatValue::mapping(std::move(fields));
  for (const auto& [field, value] : fields) checked_field_name(context, field);
  return {ChatValue::Namespace{std::make_shared<ChatFields>(std::move(fields))}};
}

const ChatValue& kept_in_namespace(ChatContext& context, const ChatValue& value) {
  if (value.is<ChatValue::Namespace>()) context.refuse("a namespace is a part of another value");
  if (value.is<ChatValue::Loop>()) context.refuse("'loop' is a part of another value");
  return value;
}

const std::string& checked_field_name(ChatContext& context, const std::string& name) {
  if (name.starts_with('_')) context.refuse(fmt::format("the field {} of a namespace begins with _", name));
  return name;
}

}  // namespace trireme::text
