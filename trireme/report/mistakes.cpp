// A sheet of the worst mistakes.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/text.h"
#include "trireme/report/classification_view.h"
#include "trireme/report/png.h"
#include "trireme/report/svg.h"

namespace trireme::report {
namespace {

constexpr int64_t kTilesInARow = 6;
constexpr double kTileSide = 112.0, kTileStep = 136.0, kTileHeight = 162.0;
constexpr double kSheetMargin = 16.0, kSheetTop = 64.0;
constexpr int64_t kMostPixels = 128;  ///< of a side of a picture: a page holds all of them

std::string title_of(const Classification& of) {
  const int64_t mistakes = of.images - of.right - of.not_finite;
  if (mistakes <= 0)
    return fmt::format("No mistake among {} held-out images, after step {}", with_commas(of.images),
                       with_commas(of.step));
  const std::string all = with_commas(mistakes);
  const std::string which = mistakes > std::ssize(of.worst)
                                ? fmt::format("The {} worst of {} mistakes", of.worst.size(), all)
                            : mistakes == 1 ? std::string("The one mistake")
                                            : fmt::format("All {} mistakes", all);
  return fmt::format("{} among {} held-out images, after step {}", which, with_commas(of.images),
                     with_commas(of.step));
}

/// "cat, 98.2%", the name cut so that it fits.
std::string line_of(const std::string& before, const std::string& name, double probability) {
  const std::string share = ", " + share_text(probability);
  return before + fitted(name, kTileStep - 6.0 - svg_width(before + share, 12.0), 12.0) + share;
}

Markup draw_tile(const Classification& of, const Classification::Mistake& one, double x, double y) {
  const std::string& truth = of.classes.at(static_cast<size_t>(one.truth));
  const std::string& guess = of.classes.at(static_cast<size_t>(one.guess));
  Markup tile =
      element("title", fmt::format("{}: {} predicted as {}, loss {:.4g}", one.name, truth, guess, one.loss));
  tile += one.picture.pixels.empty()
              ? svg_rect(x, y, kTileSide, kTileSide, "#e4e7eb")
              : svg_image(x, y, kTileSide, kTileSide, shrunk(one.picture, kMostPixels));
  tile += svg_text({.x = x, .y = y + kTileSide + 16.0, .colour = kBadInk, .bold = true},
                   line_of("", guess, one.guess_probability));
  tile += svg_text({.x = x, .y = y + kTileSide + 32.0}, line_of("is ", truth, one.truth_probability));
  return element("g", tile);
}

}  // namespace

std::string draw_mistakes(const Classification& classification) {
  const auto& worst = classification.worst;
  const std::string below =
      worst.empty() ? "" : "Red: the predicted class and its probability. Below: the true class.";
  Markup drawn =
      svg_text({.x = kSheetMargin, .y = 26.0, .size = 15.0, .bold = true}, title_of(classification)) +
      svg_text({.x = kSheetMargin, .y = 46.0, .colour = kQuietInk}, below);
  for (int64_t i = 0; i < std::ssize(worst); ++i) {
    drawn += draw_tile(classification, worst[static_cast<size_t>(i)],
                       kSheetMargin + kTileStep * static_cast<double>(i % kTilesInARow),
                       kSheetTop + kTileHeight * static_cast<double>(i / kTilesInARow));
  }
  const int64_t rows = (std::ssize(worst) + kTilesInARow - 1) / kTilesInARow;
  return svg_document(2.0 * kSheetMargin + kTileStep * static_cast<double>(kTilesInARow),
                      kSheetTop + kTileHeight * static_cast<double>(rows), drawn);
}

}  // namespace trireme::report
