#pragma once
// A chat template cut into tokens, with the white space between tags handled as Jinja2 does with trim_blocks
// and lstrip_blocks, which is how `transformers` sets it.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::text {

struct ChatToken {
  enum class Kind {
    kData,
    kBlockBegin,
    kBlockEnd,
    kVariableBegin,
    kVariableEnd,
    kName,
    kString,
    kInteger,
    kFloat,
    kOperator,
    kEnd
  };
  Kind kind = Kind::kEnd;
  std::string text = {};  ///< of a string what its escapes stand for; of others as they are written
  int64_t line = 0;       ///< from 1 on
};

using ChatTokenKind = ChatToken::Kind;

/// The tokens of `source`, which must be UTF-8, with one of Kind::kEnd at the end; comments are left out.
/// `name` is for messages. Throws ConfigError naming the line of what is no template or is not read.
std::vector<ChatToken> chat_tokens(std::string_view source, const std::string& name);

/// Throws ConfigError: "[text.chat_template] NAME, line N: <problem>".
[[noreturn]] void refuse_chat_template(const std::string& name, int64_t line, std::string_view problem);

/// Whether Python's str.isspace() holds for the character.
bool is_python_space(uint32_t code);
/// `text` without such characters at its begin, and at its end.
std::string_view strip_left(std::string_view text);
std::string_view strip_right(std::string_view text);

}  // namespace trireme::text
