#pragma once
// The text that a chat template writes for given variables.
#include <string>
#include <vector>

#include "trireme/text/chat_template_syntax.h"
#include "trireme/text/span.h"

namespace trireme::text {

struct ChatText {
  std::string text = {};
  /// Bytes that {% generation %} blocks have written, one after another.
  std::vector<Span> generated = {};
};

/// Runs `statements` with `variables`; `name` is for messages. Throws ConfigError naming the line where the
/// template does what is not read, where raise_exception() refuses the conversation, and where the work
/// exceeds its bound.
ChatText run_chat_template(const ChatStatements& statements, const std::string& name,
                           const ChatFields& variables);

}  // namespace trireme::text
