#pragma once
// The syntax of a chat template, as Jinja2 parses it.
#include <string>
#include <string_view>

#include "trireme/text/chat_template_syntax.h"

namespace trireme::text {

/// The statements of `source`, which must be UTF-8; `name` is for messages. Throws ConfigError naming the
/// line and the part of Jinja2 that is not read, or that the template is wrong or nested too deep.
ChatStatements parse_chat_template(std::string_view source, const std::string& name);

}  // namespace trireme::text
