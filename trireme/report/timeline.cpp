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
constexpr double kWidth = 1400.0, kRowHeight = 30.0, kLeft = 90.0, kTop = 60.0, kRight = 150.0;
constexpr double kLetterWidth = 6.6;  ///< of the SVG's font

double end_of(const Timeline& timeline) {
  double end = 0.0;
  for (const TimelineRow& row : timeline.rows) {
    if (!row.bars.empty()) end = std::max(end, row.bars.back().end);
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
  for (const Bar& bar : row.bars) {
    const auto begin = static_cast<size_t>(std::lround(bar.begin * scale)),
               end = std::min(length, static_cast<size_t>(std::lround(bar.end * scale)));
    if (begin >= end) continue;
    std::string cell = bar.label.substr(0, end - begin);
    cell.resize(end - begin, ' ');
    line.replace(begin, end - begin, cell);
  }
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

std::string svg_bar(const Bar& bar, std::string_view kind, double scale, double y) {
  const double x = kLeft + bar.begin * scale, width = (bar.end - bar.begin) * scale;
  std::string text = fmt::format(
      "<g><title>{} {}: {:g} to {:g}</title><rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" "
      "height=\"{:.1f}\" "
      "fill=\"{}\" fill-opacity=\"{:.2f}\"/>",
      escaped(kind), escaped(bar.label), bar.begin, bar.end, x, y, width, kRowHeight - 6.0,
      kColours[bar.kind % kColours.size()], 1.0 - 0.55 * bar.shade);
  if (static_cast<double>(bar.label.size()) * kLetterWidth < width) {
    text += fmt::format("<text x=\"{:.2f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>", x + width / 2.0,
                        y + kRowHeight / 2.0 + 1.0, escaped(bar.label));
  }
  return text + "</g>\n";
}

std::string svg_legend(const Timeline& timeline) {
  std::string text;
  double x = kLeft;
  for (size_t kind = 0; kind < timeline.kinds.size(); ++kind) {
    text += fmt::format(
        "<rect x=\"{:.1f}\" y=\"34\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{:.1f}\" "
        "y=\"44\">{}</text>\n",
        x, kColours[kind % kColours.size()], x + 17.0, escaped(timeline.kinds[kind]));
    x += 40.0 + kLetterWidth * static_cast<double>(timeline.kinds[kind].size());
  }
  return text;
}

}  // namespace

std::string draw_text(const Timeline& timeline, int64_t columns) {
  size_t names = 0, notes = 0;
  for (const TimelineRow& row : timeline.rows) {
    names = std::max(names, row.name.size() + 1);
    notes = std::max(notes, row.note.size() + (row.note.empty() ? 0 : 2));
  }
  const int64_t room = std::max<int64_t>(10, columns - static_cast<int64_t>(names + notes));
  const double scale = columns_per_unit(timeline, room);
  const auto length = static_cast<size_t>(std::lround(end_of(timeline) * scale));
  std::string text = timeline.title.empty() ? "" : timeline.title + "\n";
  for (const TimelineRow& row : timeline.rows) {
    std::string line = fmt::format("{:<{}}{}", row.name, names, line_of(row, scale, length));
    if (row.note.empty()) {
      line.resize(line.find_last_not_of(' ') + 1);
    } else {
      line += "  " + row.note;
    }
    text += line + "\n";
  }
  return text;
}

std::string draw_svg(const Timeline& timeline) {
  const double end = end_of(timeline), scale = end > 0.0 ? (kWidth - kLeft - kRight) / end : 0.0;
  const double height = kTop + kRowHeight * static_cast<double>(timeline.rows.size()) + 34.0;
  std::string text = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0f} {:.0f}\" font-family=\"monospace\" "
      "font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{:.0f}\" y=\"20\" "
      "font-size=\"14\">{}</text>\n",
      kWidth, height, kLeft, escaped(timeline.title));
  text += svg_legend(timeline);
  double y = kTop;
  for (const TimelineRow& row : timeline.rows) {
    text += fmt::format(
        "<text x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text><rect x=\"{:.0f}\" y=\"{:.1f}\" "
        "width=\"{:.2f}\" height=\"{:.1f}\" fill=\"#eeeeee\"/>\n",
        kLeft - 8.0, y + kRowHeight / 2.0 + 1.0, escaped(row.name), kLeft, y, end * scale, kRowHeight - 6.0);
    for (const Bar& bar : row.bars) {
      text += svg_bar(bar, bar.kind < timeline.kinds.size() ? timeline.kinds[bar.kind] : "", scale, y);
    }
    if (!row.note.empty()) {
      text += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", kLeft + end * scale + 8.0,
                          y + kRowHeight / 2.0 + 1.0, escaped(row.note));
    }
    y += kRowHeight;
  }
  text += fmt::format(
      "<text x=\"{:.0f}\" y=\"{:.1f}\">0</text><text x=\"{:.1f}\" y=\"{:.1f}\" "
      "text-anchor=\"end\">{:g}</text>\n</svg>\n",
      kLeft, y + 14.0, kLeft + end * scale, y + 14.0, end);
  return text;
}

}  // namespace trireme::report
