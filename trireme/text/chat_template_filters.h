#pragma once
// Filters and tests of chat templates, as Jinja2 has them.
#include <string>
#include <string_view>
#include <vector>

#include "trireme/text/chat_template_context.h"

namespace trireme::text {

bool is_chat_filter(std::string_view name);
std::vector<std::string> chat_filter_names();
bool is_chat_test(std::string_view name);
std::vector<std::string> chat_test_names();

/// value | name(call). Throws ConfigError for arguments and values that the filter does not take.
ChatValue apply_chat_filter(ChatContext& context, const std::string& name, const ChatValue& value,
                            const ChatCall& call);
/// value is name(call).
bool chat_test_holds(ChatContext& context, const std::string& name, const ChatValue& value,
                     const ChatCall& call);

}  // namespace trireme::text
