#include "trireme/cli/folder_check.h"

#include <unistd.h>

namespace trireme::cli {

namespace fs = std::filesystem;

fs::path existing_parent(const std::string& path) {
  std::error_code error;
  fs::path place = fs::absolute(path, error);
  while (!fs::exists(place, error) && place != place.root_path()) place = place.parent_path();
  return place;
}

bool can_hold_files(const std::string& path) {
  const fs::path place = existing_parent(path);
  std::error_code error;
  return fs::is_directory(place, error) && ::access(place.c_str(), W_OK) == 0;
}

}  // namespace trireme::cli
