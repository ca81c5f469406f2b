#include "trireme/report/html.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "trireme/base/utf8.h"

namespace trireme::report {
namespace {

/// HTML closes these itself and takes "<br></br>" for two; all others need an end of their own.
constexpr auto kVoidTags =
    std::to_array<std::string_view>({"br", "circle", "img", "line", "meta", "path", "rect"});
constexpr auto kInlineTags = std::to_array<std::string_view>(
    {"a", "b", "br", "circle", "code", "i", "span", "text", "title", "tspan"});

template <size_t kSize>
bool is_one_of(const std::array<std::string_view, kSize>& tags, std::string_view tag) {
  return std::ranges::find(tags, tag) != tags.end();
}

std::string escaped_html(std::string_view text) {
  std::string html;
  for (const char letter : printable(text)) {
    switch (letter) {
      case '&':
        html += "&amp;";
        break;
      case '<':
        html += "&lt;";
        break;
      case '>':
        html += "&gt;";
        break;
      case '"':
        html += "&quot;";
        break;
      case '\'':
        html += "&#39;";
        break;
      default:
        html += letter;
    }
  }
  return html;
}

}  // namespace

Markup::Markup(std::string_view text) : html_(escaped_html(text)) {}

Markup Markup::trusted(std::string html) {
  Markup markup;
  markup.html_ = std::move(html);
  return markup;
}

Markup element(std::string_view tag, std::initializer_list<Attribute> attributes, const Markup& content) {
  std::string html = "<" + std::string(tag);
  for (const Attribute& attribute : attributes) {
    html += " ";
    html += attribute.name;
    html += "=\"" + escaped_html(attribute.value) + "\"";
  }
  if (content.empty() && is_one_of(kVoidTags, tag)) {
    html += "/>";
  } else {
    html += ">" + content.html() + "</";
    html += tag;
    html += ">";
  }
  if (!is_one_of(kInlineTags, tag)) html += "\n";
  return Markup::trusted(std::move(html));
}

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t i = 0; i < bytes.size(); i += 3) {
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    uint32_t group = 0;
    for (size_t j = 0; j < 3; ++j)
      group = group << 8 | (j < count ? static_cast<uint8_t>(bytes[i + j]) : uint32_t{0});
    for (size_t j = 0; j < 4; ++j) text += j <= count ? kDigits[group >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

}  // namespace trireme::report
