#include "trireme/report/table.h"

#include <algorithm>
#include <string_view>

#include "trireme/base/error.h"

namespace trireme::report {
namespace {

/// Code points, which are columns for all text we print.
size_t width(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(text, [](char byte) { return (byte & 0xc0) != 0x80; }));
}

void append_line(std::string& out, const std::vector<std::string>& cells, const std::vector<Column>& columns,
                 const std::vector<size_t>& widths) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    const std::string padding(widths[i] - width(cells[i]), ' ');
    if (i > 0) line += "  ";
    line += columns[i].align == Align::kRight ? padding + cells[i] : cells[i] + padding;
  }
  line.erase(line.find_last_not_of(' ') + 1);
  out += line + "\n";
}

}  // namespace

void Table::add_row(std::vector<std::string> cells) {
  TRIREME_CHECK(cells.size() == columns_.size(), "[report.table] {} cells for {} columns", cells.size(),
                columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::to_string() const {
  std::vector<std::string> titles;
  std::vector<size_t> widths;
  for (const Column& column : columns_) {
    titles.push_back(column.title);
    widths.push_back(width(column.title));
  }
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::string out;
  append_line(out, titles, columns_, widths);
  for (const auto& row : rows_) append_line(out, row, columns_, widths);
  return out;
}

}  // namespace trireme::report
