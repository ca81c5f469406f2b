#include "trireme/report/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace trireme::report {
namespace {

/// Okabe and Ito's palette, which colour-blind people tell apart.
constexpr std::array<std::string_view, 6> kColours = {"#56b4e9", "#e69f00", "#009e73",
                                                      "#cc79a7", "#0072b2", "#d55e00"};
constexpr std::array<std::string_view, 4> kCauseColours = {"#c8c8c8", "#f0e442", "#d55e00", "#333333"};
constexpr std::string_view kCauseLetters = ".~-!";
constexpr double kWidth = 1400.0, kRowHeight = 30.0, kLeftMargin = 90.0, kTopMargin = 60.0,
                 kRightMargin = 150.0;
constexpr double kHeadingHeight = 26.0, kGapHeight = 8.0;
constexpr double kLetterWidth = 6.6;  ///< of the SVG's font

double end_of(const Timeline& timeline) {
  double end = 0.0;
  for (const TimelineRow& row : timeline.rows) {
    if (!row.bars.empty()) end = std::max(end, row.bars.back().end);
    if (!row.gaps.empty()) end = std::max(end, row.gaps.back().end);
    end = std::max(end, row.end);
  }
  return end;
}

/// Columns for one unit of time: enough for the label of every bar and a blank, if that fits.
double columns_per_unit(const Timeline& timeline, int64_t room) {
  double wanted = 0.0;
  for (const TimelineRow& row : timeline.rows) {
    for (const Bar& bar : row.bars)
      wanted =
          std::max(wanted, static_cast<double>(bar.label.size() + 1) / std::max(1e-12, bar.end - bar.begin));
  }
  const double end = end_of(timeline);
  return end > 0.0 ? std::min(wanted, static_cast<double>(room) / end) : 0.0;
}

std::string line_of(const TimelineRow& row, double scale, size_t length) {
  std::string line(length, '.');
  const auto fill = [&](const Bar& bar, const std::string& with, char rest) {
    const auto begin = static_cast<size_t>(std::lround(bar.begin * scale)),
               end = std::min(length, static_cast<size_t>(std::lround(bar.end * scale)));
    if (begin >= end) return;
    std::string cell = with.substr(0, end - begin);
    cell.resize(end - begin, rest);
    line.replace(begin, end - begin, cell);
  };
  for (const Bar& gap : row.gaps) fill(gap, "", kCauseLetters[gap.kind % kCauseLetters.size()]);
  for (const Bar& bar : row.bars) fill(bar, bar.label, ' ');
  return line;
}

std::string text_legend(const Timeline& timeline) {
  std::string text;
  for (size_t cause = 0; cause < timeline.causes.size(); ++cause)
    text += fmt::format("{}{} {}", text.empty() ? "idle: " : ", ",
                        kCauseLetters[cause % kCauseLetters.size()], timeline.causes[cause]);
  return text.empty() ? text : text + "\n";
}

std::string without_blanks_behind(std::string line) {
  line.resize(line.find_last_not_of(' ') + 1);
  return line;
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char letter : text) {
    switch (letter) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      default:
        result += letter;
    }
  }
  return result;
}

/// A whole SVG, from top to bottom.
class Picture {
 public:
  explicit Picture(const Timeline& timeline)
      : timeline_(timeline),
        end_(end_of(timeline)),
        scale_(end_ > 0.0 ? (kWidth - kLeftMargin - kRightMargin) / end_ : 0.0) {}

  std::string draw() {
    double height = kTopMargin + 34.0;
    for (const TimelineRow& row : timeline_.rows)
      height += kRowHeight + (row.heading.empty() ? 0.0 : kHeadingHeight);
    text_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} {:.0f}\" font-family=\"monospace\" "
        "font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{:.0f}\" "
        "y=\"20\" font-size=\"14\">{}</text>\n",
        kWidth, height, kLeftMargin, escaped(timeline_.title));
    legend();
    for (const TimelineRow& row : timeline_.rows) draw(row);
    axis();
    return text_ + "</svg>\n";
  }

 private:
  void label(double x, double y, std::string_view anchor, const std::string& text) {
    text_ += fmt::format("<text x=\"{:.2f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>", x, y, anchor,
                         escaped(text));
  }

  void legend() {
    double x = kLeftMargin;
    const auto entry = [&](std::string_view colour, double top, double height, const std::string& name) {
      text_ += fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"12\" height=\"{:.1f}\" fill=\"{}\"/>", x,
                           top, height, colour);
      label(x + 17.0, 44.0, "start", name);
      text_ += "\n";
      x += 40.0 + kLetterWidth * static_cast<double>(name.size());
    };
    for (size_t kind = 0; kind < timeline_.kinds.size(); ++kind) {
      if (is_drawn(kind)) entry(kColours[kind % kColours.size()], 34.0, 12.0, timeline_.kinds[kind]);
    }
    if (timeline_.causes.empty()) return;
    x += 20.0;
    label(x, 44.0, "start", "idle:");
    x += 45.0;
    for (size_t cause = 0; cause < timeline_.causes.size(); ++cause)
      entry(kCauseColours[cause % kCauseColours.size()], 36.0, kGapHeight, timeline_.causes[cause]);
  }

  bool is_drawn(size_t kind) const {
    return std::ranges::any_of(timeline_.rows, [&](const TimelineRow& row) {
      return std::ranges::any_of(row.bars, [&](const Bar& bar) { return bar.kind == kind; });
    });
  }

  void draw(const TimelineRow& row) {
    if (!row.heading.empty()) {
      text_ +=
          fmt::format("<text x=\"{:.0f}\" y=\"{:.1f}\" font-size=\"12\" font-weight=\"bold\">{}</text>\n",
                      kLeftMargin, y_ + kHeadingHeight - 8.0, escaped(row.heading));
      y_ += kHeadingHeight;
    }
    const double middle = y_ + kRowHeight / 2.0 + 1.0;
    label(kLeftMargin - 8.0, middle, "end", row.name);
    text_ += fmt::format(
        "<rect x=\"{:.0f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{:.1f}\" "
        "fill=\"#f2f2f2\"/>\n",
        kLeftMargin, y_, (row.end > 0.0 ? row.end : end_) * scale_, kRowHeight - 6.0);
    const double gap_top = y_ + (kRowHeight - 6.0 - kGapHeight) / 2.0;
    for (const Bar& gap : row.gaps) {
      const auto known = gap.kind < timeline_.causes.size();
      bar(gap, gap.label + ": " + (known ? timeline_.causes[gap.kind] : ""),
          kCauseColours[gap.kind % kCauseColours.size()], gap_top, kGapHeight, 1.0);
      text_ += "</g>\n";
    }
    for (const Bar& each : row.bars) {
      const std::string kind = each.kind < timeline_.kinds.size() ? timeline_.kinds[each.kind] : "";
      bar(each, kind + " " + each.label, kColours[each.kind % kColours.size()], y_, kRowHeight - 6.0,
          1.0 - 0.55 * each.shade);
      const double width = (each.end - each.begin) * scale_;
      if (static_cast<double>(each.label.size()) * kLetterWidth < width)
        label(kLeftMargin + each.begin * scale_ + width / 2.0, middle, "middle", each.label);
      text_ += "</g>\n";
    }
    if (!row.note.empty()) label(kLeftMargin + end_ * scale_ + 8.0, middle, "start", row.note);
    text_ += "\n";
    y_ += kRowHeight;
  }

  /// Leaves its group open.
  void bar(const Bar& bar, const std::string& title, std::string_view colour, double top, double height,
           double opacity) {
    // A hairline between bars, but none that would hide a narrow one.
    const double width = (bar.end - bar.begin) * scale_, line = width > 3.0 ? 0.6 : 0.0;
    text_ += fmt::format(
        "<g><title>{}: {:g} to {:g}{}</title><rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" "
        "height=\"{:.1f}\" fill=\"{}\" fill-opacity=\"{:.2f}\"/>",
        escaped(title), bar.begin, bar.end, timeline_.unit.empty() ? "" : " " + timeline_.unit,
        kLeftMargin + bar.begin * scale_, top, width - line, height, colour, opacity);
  }

  /// Round numbers about every 120 points, and the end.
  void axis() {
    const double wanted = end_ / std::max(1.0, (kWidth - kLeftMargin - kRightMargin) / 120.0);
    const double power = wanted > 0.0 ? std::pow(10.0, std::floor(std::log10(wanted))) : 1.0;
    double step = power;
    for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
      step = factor * power;
      if (step >= wanted) break;
    }
    const double y = y_ + 14.0, end_at = kLeftMargin + end_ * scale_;
    const std::string last =
        fmt::format("{:.4g}{}", end_, timeline_.unit.empty() ? "" : " " + timeline_.unit);
    for (int i = 0; i == 0 || (step > 0.0 && i * step < end_); ++i) {
      const double x = kLeftMargin + i * step * scale_;
      if (i > 0 && x + 60.0 > end_at - kLetterWidth * static_cast<double>(last.size())) break;
      text_ +=
          fmt::format("<line x1=\"{:.1f}\" x2=\"{:.1f}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#888888\"/>", x,
                      x, y_ - 4.0, y_ + 2.0);
      label(x, y, i == 0 ? "start" : "middle", fmt::format("{:g}", i * step));
    }
    label(end_at, y, "end", last);
    text_ += "\n";
  }

  const Timeline& timeline_;
  double end_, scale_;
  double y_ = kTopMargin;
  std::string text_;
};

}  // namespace

std::string draw_text(const Timeline& timeline, int64_t columns) {
  constexpr int64_t kLeastRoom = 30;
  size_t names = 0, notes = 0;
  for (const TimelineRow& row : timeline.rows) {
    names = std::max(names, row.name.size() + 1);
    notes = std::max(notes, row.note.size() + (row.note.empty() ? 0 : 2));
  }
  const int64_t beside = columns - static_cast<int64_t>(names + notes);
  const bool notes_below = notes > 0 && beside < kLeastRoom;
  const int64_t room = std::max<int64_t>(1, notes_below ? columns - static_cast<int64_t>(names) : beside);
  const double scale = columns_per_unit(timeline, room);
  const auto length = static_cast<size_t>(std::lround(end_of(timeline) * scale));
  std::string text = timeline.title.empty() ? "" : timeline.title + "\n";
  text += text_legend(timeline);
  for (const TimelineRow& row : timeline.rows) {
    if (!row.heading.empty()) text += row.heading + "\n";
    const std::string line = fmt::format("{:<{}}{}", row.name, names, line_of(row, scale, length));
    if (row.note.empty() || notes_below) {
      text += without_blanks_behind(line) + "\n";
      if (!row.note.empty()) text += fmt::format("{:<{}}{}\n", "", names, row.note);
    } else {
      text += line + "  " + row.note + "\n";
    }
  }
  return text;
}

std::string draw_svg(const Timeline& timeline) {
  return Picture(timeline).draw();
}

}  // namespace trireme::report
