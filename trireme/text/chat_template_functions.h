#pragma once
// Functions that chat templates find defined, and what namespaces may hold.
#include <string>
#include <string_view>

#include "trireme/text/chat_template_context.h"

namespace trireme::text {

/// range, namespace, dict and raise_exception. strftime_now is none of them: text for training must not
/// depend on the day.
bool is_chat_function(std::string_view name);
/// The value of a call of such a function. raise_exception throws ConfigError.
ChatValue call_chat_function(ChatContext& context, const std::string& name, const ChatCall& call);

/// `value`, as a part of a namespace, a list or a mapping. Throws ConfigError for values that could hold the
/// namespace itself, which would never be freed.
const ChatValue& kept_in_namespace(ChatContext& context, const ChatValue& value);
/// `name` as that of a field of a namespace; one that begins with _ is refused, as `transformers` does.
const std::string& checked_field_name(ChatContext& context, const std::string& name);

}  // namespace trireme::text
