#include "trireme/checkpoint/new_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

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

std::string name_of(const std::string& path) {
  std::string name = fs::path(without_slashes(path)).filename();
  if (!name.empty() && name != "." && name != "..") return name;
  throw ConfigError("[checkpoint.new_folder] '{}' does not end in the name of a new folder; add one", path);
}

/// What Folder::remove() can remove, so that nothing else is lost by mistake.
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

void check_free(const std::string& path, bool replaces) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return;
  if (replaces) return check_replaceable(path);
  throw EnvironmentError(
      "[checkpoint.new_folder] {} exists already; choose another folder, or replace it with --force", path);
}

Folder make(const Folder& parent, const std::string& name, const std::string& temporary, bool replaces) {
  check_free(parent.path_of(name), replaces);
  return parent.create_folder(temporary);
}

/// errno of giving `from` the name `to`, which must be free; 0: it has it. Not every file system can tell and
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
    : parent_(parent_of(without_slashes(path))),
      name_(name_of(path)),
      temporary_(fmt::format("trireme-{}.tmp", ::getpid())),
      replaces_(replaces),
      folder_(make(parent_, name_, temporary_, replaces)) {}

NewFolder::~NewFolder() {
  if (committed_) return;
  try {
    parent_.remove(temporary_);
  } catch (const Error& error) {
    log_warning("{}", error.what());
  }
}

void NewFolder::commit() {
  const std::string from = parent_.path_of(temporary_), to = parent_.path_of(name_);
  folder_.sync();
  check_free(to, replaces_);
  int error = rename_to_free(from, to);
  const bool changes_places = error == EEXIST && replaces_;
  if (changes_places)
    error = ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0 ? 0 : errno;
  if (error != 0)
    throw EnvironmentError("[checkpoint.new_folder] cannot rename {} to {}: {}; choose another folder", from,
                           to, errno_text(error));
  committed_ = true;
  if (changes_places) parent_.remove(temporary_);  // the old one, by now
  parent_.sync();
}

}  // namespace trireme::checkpoint
