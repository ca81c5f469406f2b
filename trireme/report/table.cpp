#include "trireme/report/table.h"

#include <algorithm>
#include <numeric>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::report {
namespace {

/// Code points, which are columns for all text we print.
size_t width(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(text, [](char byte) { return (byte & 0xc0) != 0x80; }));
}

constexpr size_t kGap = 2;
constexpr size_t kLeastProse = 24;  ///< columns below which wrapped text cannot be read

size_t total(const std::vector<size_t>& widths) {
  return std::accumulate(widths.begin(), widths.end(), kGap * (widths.size() - 1));
}

size_t longest_line(const std::string& text) {
  const std::vector<std::string> lines = split(text, '\n');
  return std::transform_reduce(
      lines.begin(), lines.end(), size_t{0}, [](size_t a, size_t b) { return std::max(a, b); }, width);
}

/// `text` cut between words into lines of at most `columns`; a longer word stands alone.
std::vector<std::string> wrapped(const std::string& text, size_t columns) {
  std::vector<std::string> lines(1);
  for (const std::string& word : split(text, ' ')) {
    const bool fits = lines.back().empty() || width(lines.back()) + 1 + width(word) <= columns;
    if (!fits) lines.emplace_back();
    lines.back() += (lines.back().empty() ? "" : " ") + word;
  }
  return lines;
}

void append_line(std::string& out, const std::vector<std::string>& cells, const std::vector<Column>& columns,
                 const std::vector<size_t>& widths) {
  std::string line;
  for (size_t i = 0; i < cells.size(); ++i) {
    const std::string padding(widths[i] - std::min(widths[i], width(cells[i])), ' ');
    if (i > 0) line += std::string(kGap, ' ');
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

std::vector<size_t> Table::widths() const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(width(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  return widths;
}

/// At most `columns` wide where the last column can be wrapped to that.
std::string Table::as_rows(size_t columns) const {
  std::vector<size_t> widths = this->widths();
  const size_t others = total(widths) - widths.back();
  const bool prose = columns_.back().align == Align::kLeft && columns >= others + kLeastProse;
  if (prose) widths.back() = std::min(widths.back(), columns - others);
  std::vector<std::string> titles;
  for (const Column& column : columns_) titles.push_back(column.title);
  std::string out;
  append_line(out, titles, columns_, widths);
  for (std::vector<std::string> row : rows_) {
    const std::vector<std::string> lines =
        prose ? wrapped(row.back(), widths.back()) : std::vector<std::string>{row.back()};
    for (const std::string& line : lines) {
      row.back() = line;
      append_line(out, row, columns_, widths);
      std::fill(row.begin(), row.end(), "");
    }
  }
  return out;
}

std::string Table::as_columns() const {
  std::vector<Column> titles = {{columns_.front().title}};
  for (const auto& row : rows_) titles.push_back({row.front(), Align::kRight});
  Table turned(titles);
  for (size_t i = 1; i < columns_.size(); ++i) {
    std::vector<std::string> cells = {columns_[i].title};
    for (const auto& row : rows_) cells.push_back(row[i]);
    turned.add_row(std::move(cells));
  }
  return turned.as_rows(0);
}

std::string Table::as_blocks(size_t columns) const {
  std::string out;
  for (const auto& row : rows_) {
    Table block({{columns_.front().title}, {row.front()}});
    for (size_t i = 1; i < columns_.size(); ++i) block.add_row({columns_[i].title, row[i]});
    out += (out.empty() ? "" : "\n") + block.as_rows(columns);
  }
  return out;
}

std::string Table::to_string(int64_t columns) const {
  const auto limit = static_cast<size_t>(std::max<int64_t>(columns, 0));
  std::string rows = as_rows(limit);
  if (limit == 0 || rows_.empty() || longest_line(rows) <= limit) return rows;
  if (columns_.size() < 3) return rows;
  std::string turned = as_columns();
  return longest_line(turned) <= limit ? turned : as_blocks(limit);
}

}  // namespace trireme::report
