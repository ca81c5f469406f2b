#pragma once
// Text tables with aligned columns, for people.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::report {

enum class Align { kLeft, kRight };

struct Column {
  std::string title;
  Align align = Align::kLeft;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// One cell a column; throws LogicError for another count.
  void add_row(std::vector<std::string> cells);

  /// Titles and rows, columns two blanks apart, no blanks at line ends; every line ends in a newline. What is
  /// wider than `columns` (0: no limit) takes the first form that fits: the text of a last column that is
  /// aligned left goes on in further lines; rows stand side by side as columns; each row is a block of lines.
  std::string to_string(int64_t columns = 0) const;

 private:
  std::vector<size_t> widths() const;
  std::string as_rows(size_t columns) const;
  std::string as_columns() const;
  std::string as_blocks(size_t columns) const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace trireme::report
