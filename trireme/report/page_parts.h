#pragma once
// Building blocks of pages about runs.
#include <string>
#include <utility>
#include <vector>

#include "trireme/report/chart.h"
#include "trireme/report/html.h"
#include "trireme/report/run_figures.h"
#include "trireme/report/run_record.h"

namespace trireme::report {

/// A whole document: style inside, nothing from elsewhere, and no script may run in it.
std::string whole_page(const std::string& title, const Markup& body);

/// The style of whole_page().
std::string_view page_style();

/// A section of a page; empty where `content` is.
Markup section(const std::string& title, const Markup& content);
/// A paragraph in small print; empty where `note` is.
Markup note_below_title(const std::string& note);
/// Folded, until its title is clicked.
Markup folded(const std::string& title, const Markup& content);

/// Columns of cells below titles; scrolls sideways where it is wider than the page.
struct PageTable {
  std::vector<Markup> titles;  ///< empty: none
  std::vector<std::vector<Markup>> rows;
  std::string style = {};  ///< CSS class
};
Markup draw_table(const PageTable& table);

/// A list of facts: each line is a name and its value.
Markup draw_facts(const std::vector<std::pair<std::string, std::string>>& facts);

/// "finished", coloured.
Markup state_pill(RunState state);

/// An image inside the page. SVG of shapes, text and pixels alone becomes part of it, so that its tooltips
/// work; all else is shown as an image, in which no script runs and nothing is loaded.
Markup draw_picture(const PictureFile& picture);

/// Whether `svg` is an element svg of shapes, text and PNG data, with attributes that can only place and
/// colour them.
bool is_plain_svg(const std::string& svg);

/// "2026-11-23 03:05:12 UTC" of "2026-11-23T03:05:12.123456Z"; other text as it is.
std::string time_text(const std::string& timestamp);

}  // namespace trireme::report
