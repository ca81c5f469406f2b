#include "trireme/text/chat_template_context.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/text/chat_template_lexer.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr size_t kMostWork = size_t{1} << 27;
constexpr size_t kValueBytes = 64;

}  // namespace

void ChatContext::spend(size_t bytes) {
  spent_ += bytes;
  if (spent_ > kMostWork)
    refuse("it takes more steps or text than any conversation needs (128 MiB); look for a loop that goes on");
}

void ChatContext::refuse(std::string_view problem) const {
  refuse_chat_template(name_, line_, problem);
}

std::string ChatContext::text_of(const ChatValue& value) {
  if (value.is_undefined()) return {};
  if (value.is<ChatValue::None>()) return "None";
  if (const auto* flag = value.as<bool>()) return *flag ? "True" : "False";
  if (const auto* integer = value.as<int64_t>()) return std::to_string(*integer);
  if (const auto* number = value.as<double>()) return python_float(*number);
  if (value.string() == nullptr)
    refuse(fmt::format("{} is written as text; write it with the filter tojson", value.type_name()));
  spend(value.string()->size());
  return *value.string();
}

const std::string& ChatContext::string(const ChatValue& value, std::string_view what) const {
  if (value.string() != nullptr) return *value.string();
  const auto* undefined = value.as<ChatUndefined>();
  refuse(fmt::format("{} wants a string and gets {}{}", what, value.type_name(),
                     undefined == nullptr ? "" : " ('" + undefined->name + "')"));
}

int64_t ChatContext::integer(const ChatValue& value, std::string_view what) const {
  if (const auto* flag = value.as<bool>()) return *flag ? 1 : 0;
  if (const auto* integer = value.as<int64_t>()) return *integer;
  refuse(fmt::format("{} wants a whole number and gets {}", what, value.type_name()));
}

ChatList ChatContext::items_of(const ChatValue& value) {
  ChatList items;
  if (value.items() != nullptr) {
    items = *value.items();
  } else if (value.fields() != nullptr) {
    for (const auto& [name, field] : *value.fields()) items.push_back(ChatValue::text(name));
  } else if (const std::string* text = value.string()) {
    spend(kValueBytes * text->size());
    for (size_t i = 0; i < text->size();) {
      const size_t length = character_length((*text)[i]);
      items.push_back(ChatValue::text(text->substr(i, length)));
      i += length;
    }
  } else if (!value.is_undefined()) {
    refuse(fmt::format("{} has no items to go over", value.type_name()));
  }
  spend(kValueBytes * items.size());
  return items;
}

ChatValue ChatContext::made_list(ChatList items, bool is_tuple) {
  spend(kValueBytes * (1 + items.size()));
  return ChatValue::list(std::move(items), is_tuple);
}

ChatValue ChatContext::made_text(std::string text) {
  spend(kValueBytes + text.size());
  return ChatValue::text(std::move(text));
}

ChatGiven::ChatGiven(ChatContext& context, std::string_view callee, const ChatCall& call,
                     std::initializer_list<std::string_view> parameters)
    : context_(context), callee_(callee), values_(parameters.size(), nullptr) {
  if (call.positional.size() > parameters.size())
    context.refuse(fmt::format("{} takes at most {} arguments and gets {}", callee, parameters.size(),
                               call.positional.size()));
  for (size_t i = 0; i < call.positional.size(); ++i) values_[i] = &call.positional[i];
  for (const auto& [name, value] : call.named) {
    const auto index = static_cast<size_t>(std::ranges::find(parameters, name) - parameters.begin());
    if (index == parameters.size()) context.refuse(fmt::format("{} takes no argument '{}'", callee, name));
    if (values_[index] != nullptr) context.refuse(fmt::format("{} gets '{}' twice", callee, name));
    values_[index] = &value;
  }
}

const ChatValue& ChatGiven::need(size_t parameter) const {
  if (values_[parameter] == nullptr) context_.refuse(fmt::format("{} gets too few arguments", callee_));
  return *values_[parameter];
}

}  // namespace trireme::text
