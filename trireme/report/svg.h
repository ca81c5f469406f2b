#pragma once
// Shapes and words of pictures that stand by themselves: SVG whose colours are its own, on white.
#include <cstdint>
#include <string>
#include <string_view>

#include "trireme/base/classification.h"
#include "trireme/report/html.h"

namespace trireme::report {

// Colours for pictures on white.
inline constexpr std::string_view kInk = "#1b1f24", kQuietInk = "#5b6470", kBadInk = "#b3261e";

/// A document of `width` by `height` points, white, with a sans-serif font.
std::string svg_document(double width, double height, const Markup& content);

struct SvgText {
  double x = 0.0, y = 0.0;  ///< of the baseline
  double size = 12.0;
  std::string_view anchor = "start";
  std::string_view colour = kInk;
  bool bold = false;
  bool upwards = false;  ///< turned left, around its anchor
};
Markup svg_text(const SvgText& at, const std::string& text);

/// `title` is its tooltip; empty: none.
Markup svg_rect(double x, double y, double width, double height, std::string_view colour,
                const std::string& title = {});

/// The picture in this place, as large as fits without distortion. Pixels stay squares where it grows.
Markup svg_image(double x, double y, double width, double height, const Picture& picture);

/// The most points, nearly, that `text` takes in the font of svg_document().
double svg_width(std::string_view text, double size);
/// The beginning of `text` with "..." where it is wider than `width` points.
std::string fitted(const std::string& text, double width, double size);

/// "98.2%"; "<0.1%" and ">99.9%" where that would be 0 or 100 and is not.
std::string share_text(double share);

}  // namespace trireme::report
