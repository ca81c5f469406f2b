#pragma once
// Text tables with aligned columns, for people.
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

  /// Titles and rows, columns two blanks apart, no blanks at line ends; every line ends in a newline.
  std::string to_string() const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace trireme::report
