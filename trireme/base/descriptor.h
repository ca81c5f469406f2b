#pragma once
// A file descriptor with an owner: of a file, a folder, a pipe, a socket or whatever else the kernel numbers.
#include <utility>

namespace trireme {

/// Owns one descriptor and closes it; -1: none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  /// Closes what this one owned until now.
  Descriptor& operator=(Descriptor&& other) noexcept;
  ~Descriptor() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  /// The descriptor, which is the caller's to close from now on.
  [[nodiscard]] int release() noexcept { return std::exchange(fd_, -1); }
  /// Closes it now, once; returns the errno of close(), 0 for none.
  int close() noexcept;

 private:
  int fd_ = -1;
};

}  // namespace trireme
