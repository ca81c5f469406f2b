#pragma once
// Questions with several endings, of which one is right: JSON Lines as benchmarks such as HellaSwag have it.
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::cli {

struct Question {
  int64_t line = 0;  ///< of its file, from 1
  std::string prompt;
  std::vector<std::string> choices;  ///< two or more, none of them empty
  size_t answer = 0;                 ///< the right one
};

/// A line each: {"prompt": "...", "choices": ["...", "..."], "answer": 0}; other fields and empty lines are
/// left out. Throws ConfigError when there is no such file, it is packed, or holds no question, and DataError
/// that names the line of what is no question: answers out of range, empty endings, or fewer than two.
std::vector<Question> read_questions(const std::string& path);

}  // namespace trireme::cli
