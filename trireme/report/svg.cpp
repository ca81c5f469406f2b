#include "trireme/report/svg.h"

#include <fmt/format.h>

#include <algorithm>

#include "trireme/base/utf8.h"
#include "trireme/report/png.h"

namespace trireme::report {
namespace {

constexpr double kWideLetter = 0.6;  ///< of Latin letters in a sans-serif font, wide ones, by its size

std::string points(double value) {
  return fmt::format("{:.1f}", value);
}

/// The width of the character whose first byte is `letter`: scripts with wide letters begin with 0xe1 in
/// UTF-8.
double letter_width(char letter) {
  const auto byte = static_cast<uint8_t>(letter);
  if ((byte & 0xc0U) == 0x80U) return 0.0;
  return byte >= 0xe1U ? 2.0 * kWideLetter : kWideLetter;
}

}  // namespace

std::string svg_document(double width, double height, const Markup& content) {
  return element("svg",
                 {{"xmlns", "http://www.w3.org/2000/svg"},
                  {"width", fmt::format("{:.0f}", width)},
                  {"height", fmt::format("{:.0f}", height)},
                  {"viewBox", fmt::format("0 0 {:.0f} {:.0f}", width, height)},
                  {"font-family", "system-ui, Helvetica, Arial, sans-serif"}},
                 svg_rect(0.0, 0.0, width, height, "#ffffff") + content)
      .html();
}

/// Attributes are numbers and words of ours; the text is escaped.
Markup svg_text(const SvgText& at, const std::string& text) {
  const std::string x = points(at.x), y = points(at.y);
  std::string tag =
      fmt::format("<text x=\"{}\" y=\"{}\" font-size=\"{:g}\" fill=\"{}\"", x, y, at.size, at.colour);
  if (at.anchor != "start") tag += fmt::format(" text-anchor=\"{}\"", at.anchor);
  if (at.bold) tag += " font-weight=\"bold\"";
  if (at.upwards) tag += fmt::format(" transform=\"rotate(-90 {} {})\"", x, y);
  return Markup::trusted(tag + ">") + text + Markup::trusted("</text>\n");
}

Markup svg_rect(double x, double y, double width, double height, std::string_view colour,
                const std::string& title) {
  return element("rect",
                 {{"x", points(x)},
                  {"y", points(y)},
                  {"width", points(width)},
                  {"height", points(height)},
                  {"fill", std::string(colour)}},
                 title.empty() ? Markup() : element("title", title));
}

Markup svg_image(double x, double y, double width, double height, const Picture& picture) {
  const bool grows =
      static_cast<double>(picture.width) <= width && static_cast<double>(picture.height) <= height;
  return element("image", {{"x", points(x)},
                           {"y", points(y)},
                           {"width", points(width)},
                           {"height", points(height)},
                           {"image-rendering", grows ? "pixelated" : "auto"},
                           {"href", "data:image/png;base64," + base64(to_png(picture))}});
}

double svg_width(std::string_view text, double size) {
  double width = 0.0;
  for (const char letter : text) width += size * letter_width(letter);
  return width;
}

std::string fitted(const std::string& text, double width, double size) {
  const std::string shown = printable(text);
  if (svg_width(shown, size) <= width) return shown;
  const double room = width - svg_width("...", size);
  double taken = 0.0;
  size_t end = 0;
  for (; end < shown.size(); ++end) {
    taken += size * letter_width(shown[end]);
    if (taken > room) break;
  }
  return shown.substr(0, character_begin(shown, end)) + "...";
}

std::string share_text(double share) {
  if (share > 0.0 && share < 0.0005) return "<0.1%";
  if (share < 1.0 && share > 0.9995) return ">99.9%";
  return fmt::format("{:.1f}%", 100.0 * share);
}

}  // namespace trireme::report
