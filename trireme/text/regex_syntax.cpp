#include "trireme/text/regex_syntax.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "trireme/base/error.h"

namespace trireme::text {
namespace {

// Alphabetic, Mark, Decimal_Number and Connector_Punctuation, and the numbers of Latin-1, which Oniguruma
// counts in.
constexpr std::string_view kWordSet =
    R"(\p{L}\p{M}\p{Nd}\p{Nl}\p{Pc}\x{b2}\x{b3}\x{b9}\x{bc}-\x{be})"
    R"(\x{24b6}-\x{24e9}\x{1f130}-\x{1f149}\x{1f150}-\x{1f169}\x{1f170}-\x{1f189})";
constexpr std::string_view kHexSet = "0-9a-fA-F";

bool is_hex(char c) {
  return std::isxdigit(static_cast<unsigned char>(c)) != 0;
}

class Translator {
 public:
  explicit Translator(std::string_view pattern) : pattern_(pattern) {}

  std::string run() {
    while (!at_end()) {
      if (in_set_) {
        set_member();
      } else {
        item();
      }
    }
    return std::move(result_);
  }

 private:
  bool at_end() const { return position_ >= pattern_.size(); }
  char peek(size_t ahead = 0) const {
    return position_ + ahead < pattern_.size() ? pattern_[position_ + ahead] : '\0';
  }
  bool follows(std::string_view text) const { return pattern_.substr(position_).starts_with(text); }
  void copy(size_t count = 1) {
    result_ += pattern_.substr(position_, count);
    position_ += count;
  }

  [[noreturn]] void refuse(std::string_view what) const {
    throw ConfigError(
        "[text.regex] the pattern '{}' has {} at byte {}, which is not translated to PCRE2; write it "
        "otherwise in the tokenizer's file",
        pattern_, what, position_);
  }

  void item() {
    switch (peek()) {
      case '\\':
        return escape();
      case '[':
        return begin_set();
      case '(':
        return group();
      case '{':
        return repeat();
      default:
        return copy();
    }
  }

  void group() {
    if (follows("(*")) refuse("(*");
    if (!follows("(?")) return copy();
    copy(2);
    constexpr std::string_view kKinds = ":=!<>#";
    if (kKinds.find(peek()) != std::string_view::npos) return;
    for (; !at_end() && peek() != ':' && peek() != ')'; copy()) {
      if (peek() != 'i' && peek() != 'x' && peek() != '-') refuse("a group or an option of its own kind");
    }
  }

  /// {n}, {n,}, {,m} or {n,m}; any other brace is itself.
  void repeat() {
    const size_t close = pattern_.find('}', position_);
    const std::string_view counts =
        pattern_.substr(position_ + 1, std::min(close, pattern_.size()) - position_ - 1);
    const bool is_repeat = close != std::string_view::npos && !counts.empty() && counts != "," &&
                           counts.find_first_not_of("0123456789,") == std::string_view::npos;
    if (!is_repeat) return copy();
    result_ += counts.starts_with(',') ? "{0" : "{";
    position_ += 1;
    copy(counts.size() + 1);
    // Ruby repeats it, where PCRE2 would match as much as it can and give nothing back.
    if (peek() == '+') refuse("a repetition of a repetition");
  }

  void begin_set() {
    in_set_ = true;
    copy();
    if (peek() == '^') copy();
    if (peek() == ']') copy();
  }

  void set_member() {
    if (follows("&&")) refuse("an intersection of sets");
    switch (peek()) {
      case '\\':
        return escape();
      case '[':
        return posix_class();
      case ']':
        in_set_ = false;
        return copy();
      default:
        return copy();
    }
  }

  void posix_class() {
    constexpr std::array<std::string_view, 4> kSame = {"[:space:]", "[:digit:]", "[:upper:]", "[:lower:]"};
    const auto found = std::find_if(kSame.begin(), kSame.end(), [&](auto name) { return follows(name); });
    if (found == kSame.end()) refuse("a set within a set");
    copy(found->size());
  }

  void escape() {
    switch (peek(1)) {
      case 'w':
        return replace_escape(in_set_ ? std::string(kWordSet) : set(kWordSet));
      case 'W':
        if (in_set_) refuse("\\W in a set");
        return replace_escape("[^" + std::string(kWordSet) + "]");
      case 'h':
        return replace_escape(in_set_ ? std::string(kHexSet) : set(kHexSet));
      case 'H':
        if (in_set_) refuse("\\H in a set");
        return replace_escape("[^" + std::string(kHexSet) + "]");
      case 'b':
      case 'B':
        return in_set_ ? copy(2) : word_boundary(peek(1) == 'b');
      case 'u':
        return code_point();
      case 'p':
      case 'P':
        return property();
      default:
        return copy(2);
    }
  }

  static std::string set(std::string_view members) { return "[" + std::string(members) + "]"; }

  void replace_escape(const std::string& text) {
    result_ += text;
    position_ += 2;
  }

  void word_boundary(bool wanted) {
    const std::string word = set(kWordSet);
    replace_escape(wanted ? "(?:(?<=" + word + ")(?!" + word + ")|(?<!" + word + ")(?=" + word + "))"
                          : "(?:(?<=" + word + ")(?=" + word + ")|(?<!" + word + ")(?!" + word + "))");
  }

  void code_point() {
    const std::string_view digits = pattern_.substr(std::min(position_ + 2, pattern_.size())).substr(0, 4);
    if (digits.size() != 4 || !std::all_of(digits.begin(), digits.end(), is_hex))
      refuse("\\u without four digits");
    result_ += "\\x{" + std::string(digits) + "}";
    position_ += 6;
  }

  /// Categories have names of one or two letters. To PCRE2 the bare name of a script means its extensions,
  /// too.
  void property() {
    const bool has_name = peek(2) == '{';
    copy(has_name ? 3 : 2);
    if (!has_name) return;
    if (peek() == '^') copy();
    const size_t length = std::min(pattern_.find('}', position_), pattern_.size()) - position_;
    if (length > 2 && !follows("Any}")) result_ += "sc:";
    copy(length);
  }

  std::string_view pattern_;
  std::string result_;
  size_t position_ = 0;
  bool in_set_ = false;
};

}  // namespace

std::string to_pcre2(std::string_view pattern) {
  return Translator(pattern).run();
}

}  // namespace trireme::text
