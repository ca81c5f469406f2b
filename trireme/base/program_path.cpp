#include "trireme/base/program_path.h"

#include <unistd.h>

#include <filesystem>
#include <system_error>
#include <vector>

#include "trireme/base/text.h"

namespace trireme {

std::optional<std::string> find_trireme(const std::string& named, const Environment& environment) {
  std::vector<std::filesystem::path> places;
  if (!named.empty()) {
    places.emplace_back(named);
  } else {
    places.push_back(std::filesystem::path(own_path()).parent_path() / "trireme");
    for (const std::string& folder : split(environment.get("PATH").value_or(""), ':'))
      places.push_back(std::filesystem::path(folder) / "trireme");
  }
  std::error_code error;
  for (const std::filesystem::path& place : places) {
    if (std::filesystem::is_regular_file(place, error) && ::access(place.c_str(), X_OK) == 0)
      return place.string();
  }
  return std::nullopt;
}

std::string own_path() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).string();
}

}  // namespace trireme
