#pragma once
// Rows of workers and their work over time, drawn in a terminal or as SVG: schedules of a pipeline, simulated
// or run.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::report {

struct Bar {
  double begin = 0.0, end = 0.0;
  std::string label;
  size_t kind = 0;     ///< index into Timeline::kinds, of a gap into Timeline::causes
  double shade = 0.0;  ///< 0 to 1: lighter
};

struct TimelineRow {
  std::string name;
  std::vector<Bar> bars;       ///< in the order of time
  std::string note;            ///< behind the row
  std::vector<Bar> gaps = {};  ///< between bars, in the order of time: why nothing happens there
  std::string heading = {};    ///< above the row: of those that begin with it
  double end = 0.0;            ///< of its time; 0: that of the longest row
};

struct Timeline {
  std::string title;
  std::vector<std::string> kinds;  ///< for the legend, at most six
  std::vector<TimelineRow> rows;
  std::vector<std::string> causes = {};  ///< of gaps, for the legend, at most four
  std::string unit = {};                 ///< of time
};

/// One line a row, bars as wide as they last, at most `columns` wide in all. Labels are cut where they do not
/// fit; "." is idle, and gaps have a letter for their cause, with a legend. Notes that leave no room for the
/// row go on lines of their own.
std::string draw_text(const Timeline& timeline, int64_t columns);
/// A whole SVG document; bars say in their tooltips when they begin and end.
std::string draw_svg(const Timeline& timeline);

}  // namespace trireme::report
