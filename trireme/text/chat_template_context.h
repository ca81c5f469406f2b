#pragma once
// The state that functions of a chat template share while it renders: where they are, and the work that is
// left.
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trireme/text/chat_value.h"

namespace trireme::text {

/// Arguments of a call.
struct ChatCall {
  std::vector<ChatValue> positional = {};
  std::vector<std::pair<std::string, ChatValue>> named = {};
};

/// The work of one rendering is bounded, since templates come with models from anywhere.
class ChatContext {
 public:
  explicit ChatContext(const std::string& name) : name_(name) {}

  void at(int64_t line) { line_ = line; }
  /// Counts a step, whose time is that of some bytes.
  void step() { spend(8); }
  /// Counts `bytes` that are made or looked at. Throws ConfigError once it is too much.
  void spend(size_t bytes);
  /// Throws ConfigError naming template, line and `problem`.
  [[noreturn]] void refuse(std::string_view problem) const;

  /// As str() of Python. Refuses lists and mappings, whose Python form no template should depend on.
  std::string text_of(const ChatValue& value);
  /// The string in `value`; `what` is for messages.
  const std::string& string(const ChatValue& value, std::string_view what) const;
  int64_t integer(const ChatValue& value, std::string_view what) const;
  /// The items that `for` goes over: items, keys, characters; nothing where it is undefined.
  ChatList items_of(const ChatValue& value);

  ChatValue made_list(ChatList items, bool is_tuple = false);
  ChatValue made_text(std::string text);

 private:
  const std::string& name_;
  int64_t line_ = 0;
  size_t spent_ = 0;
};

/// Arguments of a call by the names of the parameters.
class ChatGiven {
 public:
  /// Throws ConfigError where an argument has no parameter or a parameter two arguments.
  ChatGiven(ChatContext& context, std::string_view callee, const ChatCall& call,
            std::initializer_list<std::string_view> parameters);

  /// The value of a parameter, or null.
  const ChatValue* get(size_t parameter) const { return values_[parameter]; }
  const ChatValue& need(size_t parameter) const;
  bool flag(size_t parameter) const { return get(parameter) != nullptr && get(parameter)->truthy(); }

 private:
  ChatContext& context_;
  std::string callee_;
  std::vector<const ChatValue*> values_;
};

/// The JSON of `value` as json.dumps() writes it with the arguments of the filter tojson.
std::string chat_json(ChatContext& context, const ChatValue& value, const ChatCall& call);

}  // namespace trireme::text
