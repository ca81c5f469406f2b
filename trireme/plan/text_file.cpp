#include "trireme/plan/text_file.h"

#include <algorithm>

#include <array>
#include <fstream>

#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::plan {

std::string read_text_file(const std::string& path, size_t limit) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  std::array<char, size_t{1} << 16> block{};
  do {
    file.read(block.data(), block.size());
    text.append(block.data(), static_cast<size_t>(file.gcount()));
    if (text.size() > limit) {
      throw ConfigError(
          "[plan.text_file] '{}' has more than {} bytes, the limit for such a file; give another file", path,
          limit);
    }
  } while (file.good());
  if (!file.is_open() || file.bad()) return read_file(path);  // says what is wrong with it
  return text;
}

std::vector<std::string> words_of(std::string_view line) {
  std::vector<std::string> words;
  for (size_t at = 0; at < line.size();) {
    if (line[at] == ' ' || line[at] == '\t' || line[at] == '\r') {
      ++at;
      continue;
    }
    const bool quote = line[at] == '"';
    const size_t begin = at + (quote ? 1 : 0);
    const size_t end = std::min(line.find_first_of(quote ? "\"" : " \t\r", begin), line.size());
    words.emplace_back(line.substr(begin, end - begin));
    at = end + (quote ? 1 : 0);
  }
  return words;
}

}  // namespace trireme::plan
