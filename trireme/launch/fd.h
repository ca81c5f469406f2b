#pragma once
// File descriptors with an owner, and the two that every launch needs: pipes and /dev/null.
#include <utility>

namespace trireme::launch {

/// Owns one descriptor; closes it once.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Fd() { close(); }

  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }
  void close() noexcept;

 private:
  int fd_ = -1;
};

struct Pipe {
  Fd read;   ///< never blocks: an empty pipe answers EAGAIN
  Fd write;  ///< blocks, as a program expects of its stdout
};

/// Both ends close on exec. Throws EnvironmentError when the process is out of descriptors.
Pipe make_pipe();

/// /dev/null for reading. Also fills descriptors 0 to 2 where they are closed, so that no pipe or socket made
/// later lands on a number that has a meaning. Throws EnvironmentError.
Fd open_null();

}  // namespace trireme::launch
