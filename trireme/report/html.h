#pragma once
// HTML whose text cannot be markup: escaped and unescaped text have different types.
#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>

namespace trireme::report {

/// Well-formed HTML that is XML, too. Made from text, it is that text escaped.
class Markup {
 public:
  Markup() = default;
  /// Control characters become '?', what is no UTF-8 U+FFFD.
  Markup(std::string_view text);  // NOLINT(google-explicit-constructor): text is welcome wherever markup is
  Markup(const std::string& text) : Markup(std::string_view(text)) {}  // NOLINT(google-explicit-constructor)
  Markup(const char* text) : Markup(std::string_view(text)) {}         // NOLINT(google-explicit-constructor)

  /// `html` as it is: only what this program has written.
  static Markup trusted(std::string html);

  Markup& operator+=(const Markup& other) {
    html_ += other.html_;
    return *this;
  }
  friend Markup operator+(Markup a, const Markup& b) { return a += b; }

  bool empty() const { return html_.empty(); }
  const std::string& html() const { return html_; }

 private:
  std::string html_;
};

struct Attribute {
  std::string_view name;
  std::string value;
};

/// <tag name="value">content</tag>, with a newline behind elements that are blocks.
Markup element(std::string_view tag, std::initializer_list<Attribute> attributes, const Markup& content = {});
/// A template, since a list of one attribute could be text as well.
template <std::convertible_to<Markup> Content>
Markup element(std::string_view tag, const Content& content) {
  return element(tag, {}, content);
}

/// RFC 4648, with padding.
std::string base64(std::string_view bytes);

}  // namespace trireme::report
