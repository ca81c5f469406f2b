// A confusion matrix as a picture: for a few classes with numbers, for a hundred with colours and tooltips,
// for more as an image.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "trireme/base/text.h"
#include "trireme/report/classification_view.h"
#include "trireme/report/svg.h"

namespace trireme::report {
namespace {

constexpr int64_t kMostWithShares = 10, kMostWithCounts = 24, kMostWithNames = 100;
constexpr double kLeastWidth = 660.0;  ///< of the picture, so that its title fits
constexpr double kMargin = 16.0, kMatrixTop = 64.0, kLineHeight = 17.0;
constexpr double kWidestName = 150.0;
constexpr size_t kListed = 8;  ///< classes and pairs in the lists below

using Rgb = std::array<uint8_t, 3>;
constexpr Rgb kRight = {0x00, 0x5f, 0xa8}, kWrong = {0xc8, 0x4b, 0x00}, kNone = {0xf1, 0xf3, 0xf6};

/// The colour of a cell. A right one grows darker with its share; a wrong one begins at `least`, so that
/// small shares show in cells of one pixel, too.
Rgb colour_of(double share, bool right, double least) {
  if (share <= 0.0) return kNone;
  const double depth = right ? 0.08 + 0.92 * share : least + (1.0 - least) * std::sqrt(share);
  Rgb colour{};
  for (size_t i = 0; i < colour.size(); ++i) {
    const double full = right ? kRight[i] : kWrong[i];
    colour[i] = static_cast<uint8_t>(std::lround(255.0 + depth * (full - 255.0)));
  }
  return colour;
}

std::string hex(const Rgb& colour) {
  return fmt::format("#{:02x}{:02x}{:02x}", colour[0], colour[1], colour[2]);
}

/// White on what is dark.
std::string_view ink_on(const Rgb& colour) {
  const double light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2];
  return light < 140.0 ? "#ffffff" : kInk;
}

std::string count_in(double width, int64_t count) {
  constexpr double kSize = 11.0;
  std::string text = with_commas(count);
  return svg_width(text, kSize) <= width ? text : format_count(static_cast<double>(count));
}

class ConfusionPicture {
 public:
  explicit ConfusionPicture(const Classification& of)
      : of_(of), classes_(std::ssize(of.classes)), cell_(cell_for(classes_)) {
    for (int64_t truth = 0; truth < classes_; ++truth) {
      const auto row = of.confusion.begin() + truth * classes_;
      totals_.push_back(std::accumulate(row, row + classes_, int64_t{0}));
    }
    font_ = std::clamp(cell_ - 1.0, 7.0, 12.0);
    if (has_names()) place_names();
    right_ = left_ + cell_ * static_cast<double>(classes_);
    width_ = std::max(kLeastWidth, right_ + (has_names() ? 120.0 : 0.0) + kMargin);
  }

  std::string draw() {
    Markup drawn = heading() + axes();
    drawn += has_names() ? cells() + sides() : image();
    y_ = top_ + cell_ * static_cast<double>(classes_) + 28.0;
    drawn += legend();
    drawn += lists();
    return svg_document(width_, y_ + kMargin, drawn);
  }

 private:
  static double cell_for(int64_t classes) {
    if (classes <= kMostWithShares) return 58.0;
    if (classes <= kMostWithCounts) return 36.0;
    if (classes <= kMostWithNames) return std::clamp(800.0 / static_cast<double>(classes), 8.0, 20.0);
    return std::max(1.0, std::floor(800.0 / static_cast<double>(classes)));
  }

  bool has_names() const { return classes_ <= kMostWithNames; }

  /// Beside and above the matrix, above lying where all are short.
  void place_names() {
    double widest = 0.0;
    for (const std::string& name : of_.classes) widest = std::max(widest, svg_width(name, font_));
    widest = std::min(widest, kWidestName);
    left_ = kMargin + 18.0 + widest + 8.0;
    names_lie_ = widest <= cell_ - 4.0;
    top_ = kMatrixTop + 22.0 + (names_lie_ ? font_ : widest) + 6.0;
  }

  int64_t count(int64_t truth, int64_t guess) const {
    return of_.confusion[static_cast<size_t>(truth * classes_ + guess)];
  }
  int64_t total(int64_t truth) const { return totals_[static_cast<size_t>(truth)]; }
  const std::string& name(int64_t index) const { return of_.classes[static_cast<size_t>(index)]; }
  double share(int64_t truth, int64_t guess) const {
    if (total(truth) == 0) return 0.0;
    return static_cast<double>(count(truth, guess)) / static_cast<double>(total(truth));
  }
  double x(int64_t column) const { return left_ + cell_ * static_cast<double>(column); }
  double y(int64_t row) const { return top_ + cell_ * static_cast<double>(row); }

  Markup heading() const {
    const double right =
        of_.images > 0 ? static_cast<double>(of_.right) / static_cast<double>(of_.images) : 0.0;
    std::string below = "Rows: true class. Columns: predicted class.";
    if (classes_ <= kMostWithShares) {
      below += " Cells: number of images, and their share of the row.";
    } else if (classes_ <= kMostWithCounts) {
      below += " Cells: number of images; hover over one for its share of the row.";
    } else if (has_names()) {
      below += " Hover over a cell for its number of images and their share of the row.";
    } else {
      below += " Classes in the order of their names.";
    }
    if (of_.not_finite > 0)
      below += fmt::format(" {} with non-finite logits are not counted.", with_commas(of_.not_finite));
    return svg_text({.x = kMargin, .y = 26.0, .size = 15.0, .bold = true},
                    fmt::format("{} of {} held-out images are classified correctly ({}), after step {}",
                                with_commas(of_.right), with_commas(of_.images), share_text(right),
                                with_commas(of_.step))) +
           svg_text({.x = kMargin, .y = 46.0, .colour = kQuietInk}, below);
  }

  Markup axes() const {
    const double side = cell_ * static_cast<double>(classes_);
    return svg_text(
               {.x = left_ + side / 2.0, .y = kMatrixTop + 10.0, .anchor = "middle", .colour = kQuietInk},
               "predicted") +
           svg_text({.x = kMargin + 10.0,
                     .y = top_ + side / 2.0,
                     .anchor = "middle",
                     .colour = kQuietInk,
                     .upwards = true},
                    "true") +
           svg_rect(left_, top_, side, side, hex(kNone));
  }

  Markup cells() const {
    Markup drawn;
    for (int64_t truth = 0; truth < classes_; ++truth) {
      for (int64_t guess = 0; guess < classes_; ++guess) {
        if (count(truth, guess) > 0) drawn += cell(truth, guess);
      }
    }
    return drawn;
  }

  Markup cell(int64_t truth, int64_t guess) const {
    const Rgb colour = colour_of(share(truth, guess), truth == guess, least_);
    const double gap = cell_ >= 14.0 ? 1.0 : 0.0;
    const Markup box = svg_rect(x(guess), y(truth), cell_ - gap, cell_ - gap, hex(colour));
    const double middle = x(guess) + (cell_ - gap) / 2.0, centre = y(truth) + (cell_ - gap) / 2.0;
    Markup texts;
    const SvgText number = {
        .x = middle, .y = centre + 4.0, .size = 11.0, .anchor = "middle", .colour = ink_on(colour)};
    if (classes_ <= kMostWithShares) {
      SvgText above = number, below = number;
      above.y = centre - 1.0;
      above.size = 14.0;
      below.y = centre + 14.0;
      texts = svg_text(above, count_in(cell_, count(truth, guess))) +
              svg_text(below, share_text(share(truth, guess)));
    } else if (classes_ <= kMostWithCounts) {
      texts = svg_text(number, count_in(cell_ - 4.0, count(truth, guess)));
    }
    return element("g", element("title", said(truth, guess)) + box + texts);
  }

  std::string said(int64_t truth, int64_t guess) const {
    const std::string part = fmt::format("{} of {} ({})", with_commas(count(truth, guess)),
                                         with_commas(total(truth)), share_text(share(truth, guess)));
    return truth == guess ? fmt::format("{}: {} correct", name(truth), part)
                          : fmt::format("{} predicted as {}: {}", name(truth), name(guess), part);
  }

  /// Names before and above, counts and shares of rows behind.
  Markup sides() const {
    const double heads = top_ - 6.0;
    Markup drawn =
        svg_text({.x = right_ + 58.0, .y = heads, .size = 11.0, .anchor = "end", .colour = kQuietInk},
                 "images") +
        svg_text({.x = right_ + 112.0, .y = heads, .size = 11.0, .anchor = "end", .colour = kQuietInk},
                 "right");
    const double drop = cell_ / 2.0 + 0.35 * font_;
    for (int64_t i = 0; i < classes_; ++i) {
      const std::string shown = fitted(name(i), kWidestName, font_);
      const std::string_view colour = total(i) > 0 ? kInk : kQuietInk;
      drawn += svg_text(
          {.x = left_ - 8.0, .y = y(i) + drop, .size = font_, .anchor = "end", .colour = colour}, shown);
      drawn += names_lie_
                   ? svg_text({.x = x(i) + cell_ / 2.0, .y = heads, .size = font_, .anchor = "middle"}, shown)
                   : svg_text({.x = x(i) + drop, .y = heads, .size = font_, .upwards = true}, shown);
      drawn += svg_text(
          {.x = right_ + 58.0, .y = y(i) + drop, .size = font_, .anchor = "end", .colour = kQuietInk},
          with_commas(total(i)));
      drawn +=
          svg_text({.x = right_ + 112.0, .y = y(i) + drop, .size = font_, .anchor = "end", .colour = colour},
                   total(i) > 0 ? share_text(share(i, i)) : "-");
    }
    return drawn;
  }

  /// A pixel for each cell, and numbers of classes at a few rows and columns.
  Markup image() const {
    Picture picture{.width = classes_, .height = classes_, .channels = 3, .pixels = {}};
    picture.pixels.reserve(static_cast<size_t>(3 * classes_ * classes_));
    for (int64_t truth = 0; truth < classes_; ++truth) {
      for (int64_t guess = 0; guess < classes_; ++guess) {
        for (const uint8_t part : colour_of(share(truth, guess), truth == guess, least_))
          picture.pixels.push_back(part);
      }
    }
    const double side = cell_ * static_cast<double>(classes_);
    Markup drawn = svg_image(left_, top_, side, side, picture);
    const int64_t every = classes_ > 400 ? 100 : 25;
    for (int64_t i = 0; i < classes_; i += every) {
      drawn +=
          svg_text({.x = left_ - 6.0, .y = y(i) + 4.0, .size = 11.0, .anchor = "end", .colour = kQuietInk},
                   std::to_string(i));
      drawn += svg_text({.x = x(i), .y = top_ - 6.0, .size = 11.0, .colour = kQuietInk}, std::to_string(i));
    }
    return drawn;
  }

  Markup legend() {
    Markup drawn;
    double at = kMargin;
    const auto say = [&](const std::string& text, std::string_view colour) {
      drawn += svg_text({.x = at, .y = y_, .size = 11.0, .colour = colour}, text);
      at += svg_width(text, 11.0) + 8.0;
    };
    say("share of its row:", kQuietInk);
    for (const bool right : {true, false}) {
      say(right ? "right" : "wrong", kInk);
      for (const double each : right ? std::array{0.25, 0.5, 0.75, 1.0} : std::array{0.01, 0.1, 0.5, 1.0}) {
        drawn += svg_rect(at, y_ - 10.0, 13.0, 13.0, hex(colour_of(each, right, least_)));
        at += 17.0;
        say(fmt::format("{:g}%", 100.0 * each), kQuietInk);
      }
      at += 12.0;
    }
    y_ += 30.0;
    return drawn;
  }

  struct Pair {
    int64_t count = 0, truth = 0, guess = 0;
  };

  /// The most frequent ones.
  std::vector<Pair> confusions() const {
    std::vector<Pair> pairs;
    for (int64_t truth = 0; truth < classes_; ++truth) {
      for (int64_t guess = 0; guess < classes_; ++guess) {
        if (truth != guess && count(truth, guess) > 0) pairs.push_back({count(truth, guess), truth, guess});
      }
    }
    const auto end = pairs.begin() + static_cast<std::ptrdiff_t>(std::min(kListed, pairs.size()));
    std::ranges::partial_sort(pairs, end, [](const Pair& a, const Pair& b) {
      return std::tuple(-a.count, a.truth, a.guess) < std::tuple(-b.count, b.truth, b.guess);
    });
    pairs.erase(end, pairs.end());
    return pairs;
  }

  /// Classes with images, those first that are least often right; none that always are.
  std::vector<int64_t> hardest() const {
    std::vector<int64_t> found;
    for (int64_t truth = 0; truth < classes_; ++truth) {
      if (total(truth) > count(truth, truth)) found.push_back(truth);
    }
    std::ranges::stable_sort(found, {}, [this](int64_t truth) { return share(truth, truth); });
    found.resize(std::min(kListed, found.size()));
    return found;
  }

  Markup lists() {
    std::vector<std::string> taken, hard;
    const double column = (width_ - 3.0 * kMargin) / 2.0, room = (column - 150.0) / 2.0;
    for (const Pair& pair : confusions()) {
      taken.push_back(fmt::format("{} as {}: {} ({})", fitted(name(pair.truth), room, 12.0),
                                  fitted(name(pair.guess), room, 12.0), with_commas(pair.count),
                                  share_text(share(pair.truth, pair.guess))));
    }
    for (const int64_t truth : hardest()) {
      hard.push_back(fmt::format("{}: {} of {}", fitted(name(truth), 2.0 * room, 12.0),
                                 share_text(share(truth, truth)), with_commas(total(truth))));
    }
    if (taken.empty()) {
      const Markup drawn = svg_text({.x = kMargin, .y = y_}, "No image was misclassified.");
      y_ += kLineHeight;
      return drawn;
    }
    const Markup drawn = list(kMargin, "Most frequent confusions", taken) +
                         list(2.0 * kMargin + column, "Lowest accuracy", hard);
    y_ += kLineHeight * static_cast<double>(std::max(taken.size(), hard.size()) + 1);
    return drawn;
  }

  Markup list(double at, const std::string& title, const std::vector<std::string>& lines) const {
    Markup drawn = svg_text({.x = at, .y = y_, .bold = true}, title);
    double y = y_;
    for (const std::string& line : lines) drawn += svg_text({.x = at, .y = y += kLineHeight}, line);
    return drawn;
  }

  const Classification& of_;
  int64_t classes_;
  double cell_;
  double least_ = cell_ < 8.0 ? 0.3 : 0.04;  ///< of colour_of()
  double font_ = 12.0;
  double left_ = kMargin + 48.0, top_ = kMatrixTop + 34.0;  ///< of the matrix
  double right_ = 0.0, width_ = 0.0;
  double y_ = 0.0;  ///< of what is drawn next
  bool names_lie_ = false;
  std::vector<int64_t> totals_;  ///< of rows
};

}  // namespace

std::string draw_confusion(const Classification& classification) {
  return classification.confusion.empty() ? std::string() : ConfusionPicture(classification).draw();
}

}  // namespace trireme::report
