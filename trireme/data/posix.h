#pragma once
// Two POSIX things that the writers of this room share: a descriptor that closes itself, and syncs by path.
#include <string>
#include <string_view>
#include <utility>

namespace trireme::data {

/// Owns a file descriptor; -1: none.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_;
};

/// Throws EnvironmentError "cannot <action> <path>: <text of errno>".
[[noreturn]] void throw_errno(std::string_view action, const std::string& path, int error);

/// fsync of a file or folder. Throws EnvironmentError.
void sync_path(const std::string& path);

}  // namespace trireme::data
