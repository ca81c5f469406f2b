#include "trireme/checkpoint/new_folder.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string parent_of(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

std::string with_name(std::string path) {
  path = without_slashes(std::move(path));
  const std::string name = fs::path(path).filename();
  if (!name.empty() && name != "." && name != "..") return path;
  throw ConfigError("[checkpoint.new_folder] '{}' does not end in the name of a new folder; add one", path);
}

/// A folder within is none of ours, so that nothing else is lost by mistake.
void check_replaceable(const std::string& path) {
  std::error_code error;
  bool replaceable = fs::is_directory(fs::symlink_status(path, error));
  for (const auto& entry : fs::directory_iterator(path, error))
    replaceable &= entry.symlink_status().type() == fs::file_type::regular;
  if (replaceable && !error) return;
  throw EnvironmentError(
      "[checkpoint.new_folder] {} is not a folder of plain files and is not replaced; choose another name",
      path);
}

const std::string& check_free(const std::string& path, bool replaces) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return path;
  if (!replaces) {
    throw EnvironmentError(
        "[checkpoint.new_folder] {} exists already; choose another folder, or replace it with --force", path);
  }
  check_replaceable(path);
  return path;
}

/// Renames `from` to `to`, which must be free; returns errno, or 0. Not every file system can check and
/// rename at once.
int rename_to_free(const std::string& from, const std::string& to) {
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return 0;
  if (errno != EINVAL) return errno;
  std::error_code error;
  if (fs::exists(fs::symlink_status(to, error))) return EEXIST;
  return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}

}  // namespace

NewFolder::NewFolder(const std::string& path, bool replaces)
    : path_(with_name(path)),
      replaces_(replaces),
      unfinished_(check_free(path_, replaces), Unfinished::Kind::kFolder),
      folder_(unfinished_.path()) {}

void NewFolder::commit() {
  const std::string& from = unfinished_.path();
  folder_.sync();
  check_free(path_, replaces_);
  int error = rename_to_free(from, path_);
  const bool changes_places = error == EEXIST && replaces_;
  if (changes_places)
    error = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, path_.c_str(), RENAME_EXCHANGE) == 0 ? 0 : errno;
  if (error != 0)
    throw EnvironmentError("[checkpoint.new_folder] cannot rename {} to {}: {}; choose another folder", from,
                           path_, errno_text(error));
  if (changes_places) {
    unfinished_.remove();  // the old one, by now
  } else {
    unfinished_.keep();
  }
  sync_folder(parent_of(path_));
}

}  // namespace trireme::checkpoint
