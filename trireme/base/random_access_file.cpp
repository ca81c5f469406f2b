#include "trireme/base/random_access_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {
namespace {

[[noreturn]] void fail_to(std::string_view action, const std::string& path) {
  const int error = errno;
  const bool no_more = error == EMFILE || error == ENFILE;
  throw EnvironmentError(
      "[base.file] cannot {} {}: {}; {}", action, path, errno_text(error),
      no_more ? "raise the limit of open files (ulimit -n)" : "check the path and its permissions");
}

}  // namespace

RandomAccessFile::RandomAccessFile(std::string path)
    : path_(std::move(path)), file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (!file_) fail_to("open", path_);
  struct stat info {};
  if (::fstat(file_.get(), &info) != 0) fail_to("stat", path_);
  size_ = info.st_size;
}

void RandomAccessFile::read(int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(file_.get(), out.data(), out.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_to("read", path_);
    if (got == 0) {
      throw DataError(
          "[base.file] {} ends before byte {}, but had {} bytes; do not change it while it is read", path_,
          offset, size_);
    }
    out = out.subspan(static_cast<size_t>(got));
    offset += got;
  }
}

}  // namespace trireme
