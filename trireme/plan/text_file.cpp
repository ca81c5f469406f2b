#include "trireme/plan/text_file.h"

#include <fstream>

#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::plan {

std::string read_text_file(const std::string& path, size_t limit) {
  std::ifstream file(path, std::ios::binary);
  std::string text(limit + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) return read_file(path);  // says what is wrong with it
  if (!file.eof()) {
    throw ConfigError(
        "[plan.text_file] '{}' has more than {} bytes, the limit for such a file; give another file", path,
        limit);
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

}  // namespace trireme::plan
