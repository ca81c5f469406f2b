#include "trireme/report/chart.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "trireme/base/text.h"
#include "trireme/report/svg.h"

namespace trireme::report {
namespace {

// In units of the picture, which the page scales to its column.
constexpr double kChartWidth = 560.0, kChartHeight = 250.0;
constexpr double kPlotLeft = 66.0, kPlotRight = 546.0, kPlotTop = 26.0, kPlotBottom = 212.0;
constexpr double kHoverWidth = 4.0;  ///< narrower is hard to point at
constexpr size_t kMostDots = 60;     ///< points of a line that are drawn as dots, too
constexpr int64_t kXTicks = 6, kYTicks = 6;

std::string place_text(double value) {
  return fmt::format("{:.1f}", value);
}

/// A step, or a moment.
std::string x_text(const Chart& chart, double x) {
  return chart.x_unit == Unit::kCount ? with_commas(std::llround(x)) : format_value(chart.x_unit, x);
}

/// The plot of a chart: where a value lies in the picture.
struct Frame {
  Axis x, y;
  double left(double value) const { return kPlotLeft + x.place(value) * (kPlotRight - kPlotLeft); }
  double top(double value) const {
    const double place = y.log && value <= 0.0 ? 0.0 : y.place(value);
    return kPlotBottom - std::clamp(place, 0.0, 1.0) * (kPlotBottom - kPlotTop);
  }
};

Markup line_between(std::string_view style, double x1, double y1, double x2, double y2) {
  return element("line", {{"class", std::string(style)},
                          {"x1", place_text(x1)},
                          {"y1", place_text(y1)},
                          {"x2", place_text(x2)},
                          {"y2", place_text(y2)}});
}

Markup label_at(double x, double y, std::string_view anchor, const std::string& text) {
  return element("text", {{"x", place_text(x)}, {"y", place_text(y)}, {"text-anchor", std::string(anchor)}},
                 text);
}

Markup draw_axes(const Frame& frame, const std::string& x_name) {
  Markup axes;
  for (size_t i = 0; i < frame.y.ticks.size(); ++i) {
    const double y = frame.top(frame.y.ticks[i]);
    axes += line_between("grid", kPlotLeft, y, kPlotRight, y);
    axes += label_at(kPlotLeft - 6.0, y + 4.0, "end", frame.y.labels[i]);
  }
  axes += line_between("axis", kPlotLeft, kPlotBottom, kPlotRight, kPlotBottom);
  for (size_t i = 0; i < frame.x.ticks.size(); ++i) {
    const double x = frame.left(frame.x.ticks[i]);
    axes += line_between("axis", x, kPlotBottom, x, kPlotBottom + 4.0);
    // The name of the axis stands at its right end, below the labels.
    axes += label_at(x, kPlotBottom + 18.0, x > kPlotRight - 16.0 ? "end" : "middle", frame.x.labels[i]);
  }
  axes += label_at(kPlotRight, kPlotBottom + 34.0, "end",
                   x_name + (x_name.empty() || frame.x.suffix.empty() ? "" : ", ") + frame.x.suffix);
  std::string above = frame.y.suffix;
  if (frame.y.log) above += above.empty() ? "log scale" : ", log scale";
  if (!above.empty()) axes += label_at(kPlotLeft - 58.0, kPlotTop - 12.0, "start", above);
  return axes;
}

Markup draw_marks(const Frame& frame, const std::vector<ChartMark>& marks) {
  Markup drawn;
  for (const ChartMark& mark : marks) {
    if (mark.at < frame.x.low || mark.at > frame.x.high) continue;
    const double x = frame.left(mark.at);
    drawn += element("g", {{"class", "mark"}},
                     element("title", mark.what) + line_between("mark", x, kPlotTop, x, kPlotBottom));
  }
  return drawn;
}

Markup picture(const std::string& name, const Markup& content) {
  return element("svg",
                 {{"viewBox", fmt::format("0 0 {:.0f} {:.0f}", kChartWidth, kChartHeight)},
                  {"role", "img"},
                  {"aria-label", name}},
                 content);
}

Markup figure_of(const std::string& title, const std::string& of, const Markup& legend, const Markup& svg,
                 const std::vector<std::string>& notes) {
  Markup caption = element("b", title);
  if (!of.empty()) caption += element("span", {{"class", "of"}}, of);
  Markup below;
  for (const std::string& note : notes) below += element("p", {{"class", "note"}}, note);
  return element("figure", {{"class", "chart"}}, element("figcaption", caption) + legend + svg + below);
}

std::string line_style(size_t index) {
  const std::string colour = fmt::format("c{}", index % kChartColours);
  return index < kChartColours ? colour : fmt::format("{} dash{}", colour, 1 + index / kChartColours % 2);
}

Markup draw_legend(const Chart& chart) {
  if (chart.lines.size() < 2) return {};
  Markup entries;
  for (size_t i = 0; i < chart.lines.size(); ++i) {
    if (chart.lines[i].curve.empty()) continue;
    entries += element("span", colour_box(i) + chart.lines[i].name) + " ";
  }
  return element("div", {{"class", "legend"}}, entries);
}

/// Lines with what is drawn of them.
class LineChart {
 public:
  explicit LineChart(const Chart& chart) : chart_(chart) {
    for (const ChartLine& line : chart.lines) bins_.push_back(bins_of(line.curve, kMostBins));
  }

  /// Finds the axes; false: no line has a point, so nothing can be drawn.
  bool fit() {
    auto x = range([](const Bin& bin) { return std::pair(bin.first, bin.last); }, false);
    if (!x) return false;
    if (chart_.form == Chart::Form::kEvents) x->first = std::min(x->first, 0.0);
    frame_.x =
        make_axis(x->first, x->second,
                  {.unit = chart_.x_unit, .log = chart_.x_log, .round_ends = false, .most_ticks = kXTicks});
    const auto y = range([](const Bin& bin) { return std::pair(bin.low, bin.high); }, true);
    const std::pair<double, double> values = y.value_or(std::pair(0.0, 1.0));
    frame_.y = make_axis(
        values.first, values.second,
        {.unit = chart_.unit,
         .log = wants_log(values),
         .from_zero = chart_.scale == Chart::Scale::kFromZero || chart_.scale == Chart::Scale::kAutoFromZero,
         .most_ticks = kYTicks});
    return true;
  }

  Markup plot() const {
    Markup svg = draw_axes(frame_, chart_.x_name);
    for (size_t i = 0; i < bins_.size(); ++i) svg += draw_line(i);
    svg += draw_marks(frame_, chart_.marks);
    svg += draw_not_finite();
    svg += draw_hover();
    return svg;
  }

  std::vector<std::string> notes() const {
    std::vector<std::string> said;
    if (!chart_.note.empty()) said.push_back(chart_.note);
    int64_t not_finite = 0;
    for (const std::vector<Bin>& line : bins_) {
      for (const Bin& bin : line) not_finite += bin.not_finite;
    }
    if (not_finite > 0) {
      said.push_back(fmt::format("{} {} not finite (NaN or infinity); red lines below show where.",
                                 with_commas(not_finite), not_finite == 1 ? "value is" : "values are"));
    }
    return said;
  }

 private:
  /// The smallest and the largest of what `ends_of` gives for bins; of those with a finite value, or of all.
  template <typename EndsOf>
  std::optional<std::pair<double, double>> range(EndsOf ends_of, bool finite) const {
    std::optional<std::pair<double, double>> found;
    for (const std::vector<Bin>& line : bins_) {
      for (const Bin& bin : line) {
        if (finite && bin.count == 0) continue;
        const auto [low, high] = ends_of(bin);
        found = found ? std::pair(std::min(found->first, low), std::max(found->second, high))
                      : std::pair(low, high);
      }
    }
    return found;
  }

  bool wants_log(std::pair<double, double> values) const {
    constexpr double kWide = 30.0, kFarOut = 10.0;
    const bool may_be = chart_.scale == Chart::Scale::kAuto || chart_.scale == Chart::Scale::kAutoFromZero;
    if (!may_be || values.first <= 0.0) return false;
    if (values.second >= kWide * values.first) return true;
    std::vector<double> means;
    for (const std::vector<Bin>& line : bins_) {
      for (const Bin& bin : line) {
        if (bin.count > 0) means.push_back(bin.mean);
      }
    }
    return values.second >= kFarOut * *quantile(std::move(means), 0.5);
  }

  /// Bins one after the other with a finite value.
  std::vector<std::vector<Bin>> pieces_of(size_t line) const {
    std::vector<std::vector<Bin>> pieces(1);
    for (const Bin& bin : bins_[line]) {
      if (bin.count > 0) {
        pieces.back().push_back(bin);
      } else if (!pieces.back().empty()) {
        pieces.emplace_back();
      }
    }
    if (pieces.back().empty()) pieces.pop_back();
    return pieces;
  }

  std::string point(double x, double y) const {
    return fmt::format("{:.1f} {:.1f}", frame_.left(x), frame_.top(y));
  }

  std::string path_of(const std::vector<Bin>& piece) const {
    std::string path;
    for (const Bin& bin : piece) path += (path.empty() ? "M" : "L") + point(bin.x(), bin.mean);
    return path;
  }

  /// Around all values, forth along the largest and back along the smallest.
  std::string outline_of(const std::vector<Bin>& piece) const {
    std::string path;
    for (const Bin& bin : piece) path += (path.empty() ? "M" : "L") + point(bin.x(), bin.high);
    for (auto bin = piece.rbegin(); bin != piece.rend(); ++bin) path += "L" + point(bin->x(), bin->low);
    return path + "Z";
  }

  /// Whether a later line runs within a pixel of this one, wherever it has points.
  bool is_covered(size_t index) const {
    const std::vector<Bin>& below = bins_[index];
    return std::any_of(
        bins_.begin() + static_cast<std::ptrdiff_t>(index) + 1, bins_.end(),
        [&](const std::vector<Bin>& above) {
          return !below.empty() && std::ranges::equal(below, above, [&](const Bin& a, const Bin& b) {
            return a.first == b.first && std::fabs(frame_.top(a.mean) - frame_.top(b.mean)) < 1.0;
          });
        });
  }

  Markup draw_events(size_t index) const {
    const std::string style = line_style(index);
    Markup drawn;
    for (const std::vector<Bin>& piece : pieces_of(index)) {
      for (const Bin& bin : piece) {
        const double x = frame_.left(bin.x()), y = frame_.top(bin.mean);
        drawn += line_between("line " + style, x, kPlotBottom, x, y);
        drawn +=
            element("circle",
                    {{"class", "dot " + style}, {"cx", place_text(x)}, {"cy", place_text(y)}, {"r", "2.2"}});
      }
    }
    return drawn;
  }

  Markup draw_line(size_t index) const {
    if (chart_.form == Chart::Form::kEvents) return draw_events(index);
    const bool covered = is_covered(index);
    const std::string style = line_style(index) + (covered ? " under" : "");
    Markup drawn;
    for (const std::vector<Bin>& piece : pieces_of(index)) {
      if (shares_points(index))
        drawn += element("path", {{"class", "band " + style}, {"d", outline_of(piece)}});
      if (piece.size() > 1) drawn += element("path", {{"class", "line " + style}, {"d", path_of(piece)}});
      if (piece.size() > 1 && bins_[index].size() > kMostDots) continue;
      for (const Bin& bin : piece) {
        drawn += element("circle", {{"class", "dot " + style},
                                    {"cx", place_text(frame_.left(bin.x()))},
                                    {"cy", place_text(frame_.top(bin.mean))},
                                    {"r", covered             ? "5"
                                          : piece.size() == 1 ? "3"
                                                              : "2.2"}});
      }
    }
    return drawn;
  }

  bool shares_points(size_t line) const { return chart_.lines[line].curve.size() > kMostBins; }

  Markup draw_not_finite() const {
    Markup drawn;
    for (const std::vector<Bin>& line : bins_) {
      for (const Bin& bin : line) {
        if (bin.not_finite == 0) continue;
        const double x = frame_.left(bin.x());
        drawn += line_between("bad", x, kPlotBottom - 9.0, x, kPlotBottom);
      }
    }
    return drawn;
  }

  /// A strip over the whole height wherever there is something to say.
  Markup draw_hover() const {
    const auto strips = static_cast<size_t>((kPlotRight - kPlotLeft) / kHoverWidth);
    std::vector<std::string> texts(strips);
    for (size_t line = 0; line < bins_.size(); ++line) {
      std::vector<std::pair<size_t, Bin>> places;  // strips of this line; bins that share one are joined
      for (const Bin& bin : bins_[line]) {
        const auto place = static_cast<size_t>((frame_.left(bin.x()) - kPlotLeft) / kHoverWidth);
        const size_t strip = std::min(strips - 1, place);
        if (places.empty() || places.back().first != strip) {
          places.emplace_back(strip, bin);
        } else {
          join_bin(places.back().second, bin);
        }
      }
      for (const auto& [strip, bin] : places) texts[strip] += "\n" + said(line, bin);
    }
    Markup drawn;
    for (size_t strip = 0; strip < strips; ++strip) {
      if (texts[strip].empty()) continue;
      drawn += element("rect",
                       {{"class", "hover"},
                        {"x", place_text(kPlotLeft + kHoverWidth * static_cast<double>(strip))},
                        {"y", place_text(kPlotTop)},
                        {"width", place_text(kHoverWidth)},
                        {"height", place_text(kPlotBottom - kPlotTop)}},
                       element("title", texts[strip].substr(1)));
    }
    return drawn;
  }

  static void join_bin(Bin& bin, const Bin& next) {
    if (next.count > 0) {
      const double all = static_cast<double>(bin.count + next.count);
      bin.mean =
          (bin.mean * static_cast<double>(bin.count) + next.mean * static_cast<double>(next.count)) / all;
      bin.low = bin.count == 0 ? next.low : std::min(bin.low, next.low);
      bin.high = bin.count == 0 ? next.high : std::max(bin.high, next.high);
    }
    bin.last = next.last;
    bin.count += next.count;
    bin.not_finite += next.not_finite;
  }

  /// "loss at step 12: 3.1207", "loss at steps 120 to 129: 2.9613 (2.9001 to 3.0225)".
  std::string said(size_t line, const Bin& bin) const {
    std::string text = chart_.lines[line].name + " at " + chart_.x_name;
    text += bin.first == bin.last ? fmt::format(" {}: ", x_text(chart_, bin.first))
                                  : fmt::format("{} {} to {}: ", chart_.x_unit == Unit::kCount ? "s" : "",
                                                x_text(chart_, bin.first), x_text(chart_, bin.last));
    if (bin.count > 0) text += format_value(chart_.unit, bin.mean);
    if (bin.count > 1)
      text +=
          fmt::format(" ({} to {})", format_value(chart_.unit, bin.low), format_value(chart_.unit, bin.high));
    if (bin.not_finite > 0) text += fmt::format("{}{} not finite", bin.count > 0 ? ", " : "", bin.not_finite);
    return text;
  }

  const Chart& chart_;
  std::vector<std::vector<Bin>> bins_;  ///< by line
  Frame frame_;
};

constexpr double kBetween = 20.0, kHeadHeight = 44.0;

/// The style of charts without CSS variables, which some SVG viewers lack.
std::string picture_style() {
  std::string style =
      ".grid{stroke:#e9ecf0}.axis{stroke:#5b6470;stroke-width:0.8}.line{fill:none;stroke-width:1.6;"
      "stroke-linejoin:round}.line.under{stroke-width:5;stroke-opacity:0.45}.dot.under{fill-opacity:0.45}."
      "band{fill-opacity:0.22}.dash1{stroke-"
      "dasharray:6 3}.dash2{stroke-dasharray:2 3}"
      ".mark{stroke:#5b6470;stroke-width:1.4;stroke-dasharray:4 3}.bad{stroke:#b3261e;stroke-width:1.6}"
      ".hover{fill:#1b1f24;fill-opacity:0}.hover:hover{fill-opacity:0.12}"
      ".plot text{fill:#5b6470;font-size:12px}";
  for (size_t i = 0; i < kChartColours; ++i)
    style += fmt::format(".line.c{0}{{stroke:{1}}}.band.c{0},.dot.c{0}{{fill:{1}}}", i, kLineColours[i]);
  return style;
}

/// Title, and names of lines where there are several.
Markup head_of(const Chart& chart) {
  Markup head = svg_text({.y = 14.0, .size = 13.0, .bold = true}, chart.title);
  head += svg_text({.x = svg_width(chart.title, 13.0) + 14.0, .y = 14.0, .colour = kQuietInk}, chart.of);
  if (chart.lines.size() < 2) return head;
  double x = 0.0;
  for (size_t i = 0; i < chart.lines.size(); ++i) {
    if (chart.lines[i].curve.empty()) continue;
    head += line_between("line " + line_style(i), x, 30.0, x + 18.0, 30.0);
    head += svg_text({.x = x + 24.0, .y = 34.0}, chart.lines[i].name);
    x += 48.0 + svg_width(chart.lines[i].name, 12.0);
  }
  return head;
}

Markup notes_below(const std::vector<std::string>& notes) {
  if (notes.empty()) return {};
  constexpr double kSize = 11.0, kBelowAxis = kHeadHeight + kChartHeight - 4.0;
  return svg_text({.y = kBelowAxis, .size = kSize, .colour = kQuietInk},
                  fitted(join(notes, " "), kPlotRight - 60.0, kSize));
}

struct Bars {
  double low = 0.0, width = 1.0;
  std::vector<int64_t> counts;
  int64_t below = 0, above = 0;  ///< of the first and the last bar: what lies beyond them
};

/// As many bars as the values can fill (Rice's rule), 40 at most.
Bars bars_of(const std::vector<double>& values) {
  const double low_end = *quantile(values, 0.05), high_end = *quantile(values, 0.95);
  const auto [smallest, largest] = std::ranges::minmax(values);
  const double reach = 3.0 * (high_end - low_end);
  double low = std::max(smallest, low_end - reach), high = std::min(largest, high_end + reach);
  if (!(high > low)) {
    low -= 0.5 * std::max(1e-9, std::fabs(low) * 0.01);
    high = low + std::max(1e-9, std::fabs(low) * 0.01);
  }
  constexpr size_t kMostBars = 40;
  const auto rice = static_cast<size_t>(std::ceil(2.0 * std::cbrt(static_cast<double>(values.size()))));
  Bars bars{.low = low, .width = 0.0, .counts = std::vector<int64_t>(std::clamp<size_t>(rice, 1, kMostBars))};
  bars.width = (high - low) / static_cast<double>(bars.counts.size());
  for (const double value : values) {
    const double place = std::floor((value - low) / bars.width);
    bars.below += value < low ? 1 : 0;
    bars.above += value > high ? 1 : 0;
    const double last = static_cast<double>(bars.counts.size() - 1);
    ++bars.counts[static_cast<size_t>(std::clamp(place, 0.0, last))];
  }
  return bars;
}

Markup draw_bars(const Frame& frame, const Bars& bars, Unit unit) {
  Markup drawn;
  for (size_t i = 0; i < bars.counts.size(); ++i) {
    if (bars.counts[i] == 0) continue;
    const double begin = bars.low + bars.width * static_cast<double>(i), end = begin + bars.width;
    const double top = frame.top(static_cast<double>(bars.counts[i]));
    const std::string said =
        fmt::format("{} to {}: {} step{}", format_value(unit, begin), format_value(unit, end),
                    with_commas(bars.counts[i]), bars.counts[i] == 1 ? "" : "s");
    drawn += element("rect",
                     {{"class", "bar c0"},
                      {"x", place_text(frame.left(begin))},
                      {"y", place_text(top)},
                      {"width", place_text(std::max(0.5, frame.left(end) - frame.left(begin) - 1.0))},
                      {"height", place_text(kPlotBottom - top)}},
                     element("title", said));
  }
  return drawn;
}

std::vector<std::string> notes_of(const Distribution& distribution, const Bars& bars) {
  std::vector<std::string> notes;
  if (!distribution.note.empty()) notes.push_back(distribution.note);
  const auto [smallest, largest] = std::ranges::minmax(distribution.values);
  if (bars.above > 0) {
    notes.push_back(fmt::format("The last bar counts {} beyond it, up to {}.", with_commas(bars.above),
                                format_value(distribution.unit, largest)));
  }
  if (bars.below > 0) {
    notes.push_back(fmt::format("The first bar counts {} below it, down to {}.", with_commas(bars.below),
                                format_value(distribution.unit, smallest)));
  }
  return notes;
}

}  // namespace

Markup draw_chart(const Chart& chart) {
  LineChart lines(chart);
  if (!lines.fit()) return {};
  return figure_of(chart.title, chart.of, draw_legend(chart), picture(chart.title, lines.plot()),
                   lines.notes());
}

std::string charts_as_svg(const std::string& title, const std::vector<Chart>& charts) {
  Markup drawn = element("style", Markup::trusted(picture_style()));
  drawn += svg_text({.x = kBetween, .y = 26.0, .size = 15.0, .bold = true}, title);
  int64_t count = 0;
  for (const Chart& chart : charts) {
    LineChart lines(chart);
    if (!lines.fit()) continue;
    const double x = kBetween + static_cast<double>(count % 2) * (kChartWidth + kBetween);
    const double y = kHeadHeight + static_cast<double>(count / 2) * (kHeadHeight + kChartHeight + kBetween);
    drawn += element(
        "g", {{"transform", fmt::format("translate({:.0f} {:.0f})", x, y)}},
        head_of(chart) +
            element("g", {{"class", "plot"}, {"transform", fmt::format("translate(0 {:.0f})", kHeadHeight)}},
                    lines.plot()) +
            notes_below(lines.notes()));
    ++count;
  }
  if (count == 0) return {};
  const auto rows = static_cast<double>((count + 1) / 2);
  return svg_document(2.0 * kChartWidth + 3.0 * kBetween,
                      kHeadHeight + rows * (kHeadHeight + kChartHeight + kBetween), drawn);
}

Markup draw_distribution(const Distribution& distribution) {
  Distribution finite = distribution;
  std::erase_if(finite.values, [](double value) { return !std::isfinite(value); });
  if (finite.values.empty()) return {};
  const Bars bars = bars_of(finite.values);
  Frame frame;
  frame.x = make_axis(bars.low, bars.low + bars.width * static_cast<double>(bars.counts.size()),
                      {.unit = finite.unit, .round_ends = false, .most_ticks = kXTicks});
  frame.y = make_axis(0.0, static_cast<double>(std::ranges::max(bars.counts)),
                      {.unit = Unit::kCount, .from_zero = true, .most_ticks = kYTicks});
  const Markup svg =
      draw_axes(frame, "") + draw_bars(frame, bars, finite.unit) + draw_marks(frame, finite.marks);
  return figure_of(finite.title, finite.of, {}, picture(finite.title, svg), notes_of(finite, bars));
}

Markup colour_box(size_t index) {
  return element("span", {{"class", "box " + line_style(index)}}, " ");
}

}  // namespace trireme::report
