#include "trireme/data/posix.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::data {

void throw_errno(std::string_view action, const std::string& path, int error) {
  throw EnvironmentError(
      "[data.file] cannot {} {}: {}; check the cache folder's space and permissions, or set "
      "XDG_CACHE_HOME to another one",
      action, path, errno_text(error));
}

void sync_path(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) throw_errno("open", path, errno);
  if (::fsync(file.get()) != 0) throw_errno("sync", path, errno);
}

void remove_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) throw_errno("remove", path, error.value());
}

TemporaryFolder::TemporaryFolder(std::string path) : path_(std::move(path)) {
  remove_folder(path_);
  make_directories(path_);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

void TemporaryFolder::commit(const std::string& final_path) {
  sync_path(path_);
  remove_folder(final_path);
  if (std::rename(path_.c_str(), final_path.c_str()) != 0) throw_errno("rename to", final_path, errno);
  sync_path(std::filesystem::path(final_path).parent_path());
}

}  // namespace trireme::data
