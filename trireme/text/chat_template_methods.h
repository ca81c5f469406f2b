#pragma once
// Methods of strings and mappings that chat templates call, as Python has them.
#include <string>
#include <string_view>

#include "trireme/text/chat_template_context.h"

namespace trireme::text {

/// Whether `name` is a method of Python for such a value, called here or not.
bool is_chat_method(const ChatValue& value, std::string_view name);

/// value.name(call). Throws ConfigError where there is no such method here.
ChatValue call_chat_method(ChatContext& context, const ChatValue& value, const std::string& name,
                           const ChatCall& call);

/// `text` in upper or lower case, or its first letter in upper and the others in lower case. Throws
/// ConfigError for letters that Python would change otherwise.
std::string upper_text(ChatContext& context, std::string_view text);
std::string lower_text(ChatContext& context, std::string_view text);
std::string capitalized(ChatContext& context, std::string_view text);
/// Python's str.strip() with `characters`, which may be null.
std::string stripped(ChatContext& context, std::string_view text, const ChatValue* characters, bool left,
                     bool right);
/// Python's str.replace(), `count` times at most unless it is negative.
std::string replaced(ChatContext& context, std::string_view text, std::string_view old, std::string_view by,
                     int64_t count);
ChatValue pairs_of(ChatContext& context, const ChatFields& fields);

}  // namespace trireme::text
