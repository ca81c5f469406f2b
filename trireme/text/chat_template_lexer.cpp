#include "trireme/text/chat_template_lexer.h"

#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

/// The longest first.
constexpr auto kOperators =
    std::to_array<std::string_view>({"//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[",
                                     "]",  "(",  ")",  "{",  "}",  ">",  "<", "=", ".", ":", "|", ",", ";"});

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_name_character(char c) {
  return is_digit(c) || c == '_' || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z');
}

/// Line ends as \n; one at the end of the template does not count.
std::string with_plain_lines(std::string_view source) {
  std::string lines;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '\r' && i + 1 < source.size() && source[i + 1] == '\n') continue;
    lines += source[i] == '\r' ? '\n' : source[i];
  }
  if (lines.ends_with('\n')) lines.pop_back();
  return lines;
}

class Lexer {
 public:
  Lexer(std::string_view source, const std::string& name) : source_(with_plain_lines(source)), name_(name) {}

  std::vector<ChatToken> run() {
    while (position_ < source_.size()) data_and_tag();
    add(ChatTokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void refuse(std::string_view problem) const { refuse_chat_template(name_, line_, problem); }
  std::string_view rest() const { return std::string_view(source_).substr(position_); }
  bool follows(std::string_view text) const { return rest().starts_with(text); }
  char peek(size_t ahead = 0) const {
    return position_ + ahead < source_.size() ? source_[position_ + ahead] : '\0';
  }
  void add(ChatTokenKind kind, std::string_view text) { tokens_.push_back({kind, std::string(text), line_}); }
  void skip(size_t count) {
    line_ += std::ranges::count(rest().substr(0, count), '\n');
    position_ += count;
  }
  void skip_spaces() { skip(rest().size() - strip_left(rest()).size()); }

  size_t next_tag() const {
    for (size_t at = source_.find('{', position_); at != std::string::npos; at = source_.find('{', at + 1)) {
      const char second = at + 1 < source_.size() ? source_[at + 1] : '\0';
      if (second == '%' || second == '{' || second == '#') return at;
    }
    return source_.size();
  }

  void data_and_tag() {
    const size_t tag = next_tag();
    const std::string_view data = rest().substr(0, tag - position_);
    if (tag == source_.size()) return add_data(data, data);
    const char opener = source_[tag + 1], sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
    add_data(data, sign == '-'                    ? strip_right(data)
                   : opener == '{' || sign == '+' ? data
                                                  : without_indent(data));
    skip(sign == '-' || sign == '+' ? 3 : 2);
    if (opener == '#') return comment();
    add(opener == '{' ? ChatTokenKind::kVariableBegin : ChatTokenKind::kBlockBegin, "");
    code(opener == '{' ? "}}" : "%}", opener == '{' ? ChatTokenKind::kVariableEnd : ChatTokenKind::kBlockEnd);
  }

  void add_data(std::string_view data, std::string_view kept) {
    if (!kept.empty()) add(ChatTokenKind::kData, kept);
    skip(data.size());
  }

  /// lstrip_blocks: white space between the begin of a line and a block is left out.
  std::string_view without_indent(std::string_view data) const {
    const size_t line_begin = data.rfind('\n') + 1;
    if (line_begin == 0 && !line_starts_) return data;
    return strip_left(data.substr(line_begin)).empty() ? data.substr(0, line_begin) : data;
  }

  void comment() {
    const size_t end = rest().find("#}");
    if (end == std::string_view::npos) refuse("a comment does not end; close it with #}");
    const char sign = end > 0 ? rest()[end - 1] : '\0';
    skip(end + 2);
    after_tag(sign, true);
  }

  /// trim_blocks: the line end behind a block or a comment is left out. A minus takes all white space.
  void after_tag(char sign, bool trims) {
    const size_t begin = position_;
    if (sign == '-') skip_spaces();
    if (trims && sign != '-' && sign != '+' && peek() == '\n') skip(1);
    line_starts_ = position_ > begin && source_[position_ - 1] == '\n';
  }

  void code(std::string_view end, ChatTokenKind end_kind) {
    while (true) {
      skip_spaces();
      const bool is_signed = peek() == '-' || (peek() == '+' && end_kind == ChatTokenKind::kBlockEnd);
      if (open_.empty() && rest().substr(is_signed ? 1 : 0).starts_with(end)) {
        const char sign = is_signed ? peek() : '\0';
        add(end_kind, "");
        skip(is_signed ? 3 : 2);
        return after_tag(sign, end_kind == ChatTokenKind::kBlockEnd);
      }
      if (position_ >= source_.size()) refuse(fmt::format("a tag does not end; close it with {}", end));
      token();
    }
  }

  void token() {
    if (is_digit(peek())) return number();
    if (is_name_character(peek())) return name();
    if (peek() == '\'' || peek() == '"') return string(peek());
    const auto* const found = std::ranges::find_if(kOperators, [this](auto text) { return follows(text); });
    if (found == kOperators.end())
      refuse(fmt::format("'{}' begins nothing that is read", printable_line(rest().substr(0, 1))));
    balance((*found)[0]);
    add(ChatTokenKind::kOperator, *found);
    skip(found->size());
  }

  void balance(char bracket) {
    constexpr std::string_view kOpen = "([{", kClose = ")]}";
    if (kOpen.find(bracket) != std::string_view::npos) open_ += bracket;
    const size_t kind = kClose.find(bracket);
    if (kind == std::string_view::npos) return;
    if (open_.empty() || open_.back() != kOpen[kind]) refuse(fmt::format("'{}' closes nothing", bracket));
    open_.pop_back();
  }

  size_t digits_at(size_t ahead) const {
    size_t count = 0;
    while (is_digit(peek(ahead + count))) ++count;
    return count;
  }

  void number() {
    size_t length = digits_at(0);
    bool is_float = false;
    const bool after_dot = position_ > 0 && source_[position_ - 1] == '.';
    if (!after_dot && peek(length) == '.' && is_digit(peek(length + 1))) {
      length += 1 + digits_at(length + 1);
      is_float = true;
    }
    if (const size_t exponent = after_dot ? 0 : exponent_at(length); exponent > 0) {
      length += exponent;
      is_float = true;
    }
    if (is_name_character(peek(length)))
      refuse(fmt::format("the number {} is not decimal; write it in decimal digits",
                         rest().substr(0, length + 1)));
    if (!is_float && length > 1 && peek() == '0') refuse("a number begins with 0; leave it out");
    add(is_float ? ChatTokenKind::kFloat : ChatTokenKind::kInteger, rest().substr(0, length));
    skip(length);
  }

  /// How long "e+16" is, 0 where there is none.
  size_t exponent_at(size_t ahead) const {
    if (peek(ahead) != 'e' && peek(ahead) != 'E') return 0;
    const size_t sign = peek(ahead + 1) == '+' || peek(ahead + 1) == '-' ? 1 : 0;
    const size_t digits = digits_at(ahead + 1 + sign);
    return digits == 0 ? 0 : 1 + sign + digits;
  }

  void name() {
    size_t length = 0;
    while (is_name_character(peek(length))) ++length;
    add(ChatTokenKind::kName, rest().substr(0, length));
    skip(length);
  }

  void string(char quote) {
    std::string content;
    const int64_t line = line_;
    skip(1);
    while (peek() != quote) {
      if (position_ >= source_.size()) refuse("a string does not end; close it with its quotation mark");
      if (peek() == '\\') {
        escape(content);
      } else {
        content += peek();
        skip(1);
      }
    }
    skip(1);
    tokens_.push_back({ChatTokenKind::kString, std::move(content), line});
  }

  void escape(std::string& content) {
    constexpr std::string_view kLetters = "\\'\"abfnrtv", kMeanings = "\\'\"\a\b\f\n\r\t\v";
    const char letter = peek(1);
    const size_t kind = kLetters.find(letter);
    skip(2);
    if (letter == '\n') return;
    if (letter == 'x') return code_point(2, content);
    if (letter == 'u') return code_point(4, content);
    if (letter == 'U') return code_point(8, content);
    if (letter == 'N' || is_digit(letter))
      refuse(
          fmt::format("the escape \\{} is not read; write the character itself, or \\x, \\u or \\U", letter));
    if (kind == std::string_view::npos) content += '\\';
    content += kind == std::string_view::npos ? letter : kMeanings[kind];
  }

  void code_point(size_t digits, std::string& content) {
    uint32_t code = 0;
    for (size_t i = 0; i < digits; ++i) {
      constexpr std::string_view kDigits = "0123456789abcdef";
      const char digit = static_cast<char>(is_digit(peek(i)) ? peek(i) : peek(i) | 0x20);
      const size_t value = kDigits.find(digit);
      if (value == std::string_view::npos) refuse("an escape in a string has too few hexadecimal digits");
      code = code << 4 | static_cast<uint32_t>(value);
    }
    if (code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) refuse("an escape in a string is no character");
    append_utf8(content, code);
    skip(digits);
  }

  const std::string source_;
  const std::string& name_;
  size_t position_ = 0;
  int64_t line_ = 1;
  bool line_starts_ = true;  ///< whether nothing stands before the position in its line
  std::string open_;         ///< brackets that are not closed yet
  std::vector<ChatToken> tokens_;
};

}  // namespace

void refuse_chat_template(const std::string& name, int64_t line, std::string_view problem) {
  throw ConfigError("[text.chat_template] {}, line {}: {}", name, line, problem);
}

bool is_python_space(uint32_t code) {
  return (code >= 0x09 && code <= 0x0d) || (code >= 0x1c && code <= 0x20) || code == 0x85 || code == 0xa0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 ||
         code == 0x202f || code == 0x205f || code == 0x3000;
}

std::string_view strip_left(std::string_view text) {
  while (!text.empty()) {
    const CodePoint first = code_point_at(text, 0);
    if (!is_python_space(first.value)) break;
    text.remove_prefix(std::min(first.length, text.size()));
  }
  return text;
}

std::string_view strip_right(std::string_view text) {
  while (!text.empty()) {
    const size_t last = character_begin(text, text.size() - 1);
    if (!is_python_space(code_point_at(text, last).value)) break;
    text.remove_suffix(text.size() - last);
  }
  return text;
}

std::vector<ChatToken> chat_tokens(std::string_view source, const std::string& name) {
  return Lexer(source, name).run();
}

}  // namespace trireme::text
