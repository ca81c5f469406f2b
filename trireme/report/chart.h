#pragma once
// Line charts and distributions as figures of an HTML page: inline SVG, coloured by the page's style.
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/report/curve.h"
#include "trireme/report/html.h"
#include "trireme/report/ticks.h"

namespace trireme::report {

/// How many colours a chart has for its lines; further lines are dashed.
inline constexpr size_t kChartColours = 8;

/// How many places a line has. When it has more points, those of one place are drawn as their mean, with a
/// band from their smallest to their largest.
inline constexpr size_t kMostBins = 488;

struct ChartLine {
  std::string name;
  Curve curve;
};

/// A place on the x axis that is worth a line of its own.
struct ChartMark {
  double at = 0.0;
  std::string what;
};

struct Chart {
  /// kAuto and kAutoFromZero are a log axis when all values are positive and the largest is 30 times the
  /// smallest, or 10 times the median.
  enum class Scale { kLinear, kFromZero, kAuto, kAutoFromZero };
  /// kEvents: points that have nothing to do with each other, each at the end of a stem, over x from 0 on.
  enum class Form { kLines, kEvents };

  std::string title;
  std::string of = {};  ///< behind the title: what is shown, "nats per token"
  Unit unit = Unit::kNumber;
  Scale scale = Scale::kLinear;
  Form form = Form::kLines;
  std::vector<ChartLine> lines;
  std::vector<ChartMark> marks = {};
  Unit x_unit = Unit::kCount;
  bool x_log = false;  ///< x, which must be positive, has a log axis
  std::string x_name = "step";
  std::string note = {};  ///< below
};

/// A <figure>: title, legend where there are several lines, picture, and a note on values that are not
/// finite. A line that a later one covers is drawn wider. Empty when there is no line with a point. Hovering
/// names steps and values.
Markup draw_chart(const Chart& chart);

/// Charts as one SVG picture, two beside each other, in the colours of a light page. Empty when none has a
/// point.
std::string charts_as_svg(const std::string& title, const std::vector<Chart>& charts);

/// The colours of lines in such a picture; the style of pages has the same.
inline constexpr std::array<std::string_view, kChartColours> kLineColours = {
    "#0072b2", "#d55e00", "#009e73", "#b65c97", "#b8860b", "#56a0d3", "#6b4fbb", "#7a7a7a"};

/// A histogram, drawn as a <figure>. Marks are on the axis of values. Values beyond three times the range
/// between the 5% and the 95% quantile are counted in the first or the last bar.
struct Distribution {
  std::string title;
  std::string of = {};
  Unit unit = Unit::kNumber;
  std::vector<double> values;
  std::vector<ChartMark> marks = {};
  std::string note = {};
};
Markup draw_distribution(const Distribution& distribution);

/// The colour of line `index`, as a box for legends and tables.
Markup colour_box(size_t index);

}  // namespace trireme::report
