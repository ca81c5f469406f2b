#pragma once
// Our own stdout or stderr, written without ever blocking: a reader that stalls must not keep the launcher
// from handling signals and exits.
#include <string>
#include <string_view>
#include <utility>

namespace trireme::launch {

class Outlet {
 public:
  /// `name` is for the warning when writing fails. The descriptor's flags are left alone: others share it.
  Outlet(int fd, std::string name) : fd_(fd), name_(std::move(name)) {}

  /// Queues the bytes and writes what the descriptor takes now.
  void write(std::string_view bytes);
  /// Writes what the descriptor takes now.
  void pump();

  int fd() const { return fd_; }
  bool pending() const { return written_ < queue_.size(); }
  /// Whether so much is queued that its sources should not be read for now.
  bool choked() const { return queue_.size() - written_ > kChoked; }
  /// Whether the reader has closed its end: everything written from now on is dropped.
  bool hung_up() const { return hung_up_; }
  /// Whether bytes were dropped for another reason, as on a full disk.
  bool lost() const { return broken_ && !hung_up_; }

 private:
  static constexpr size_t kChoked = 256 << 10;

  void fail(int error);

  int fd_;
  std::string name_;
  std::string queue_;
  size_t written_ = 0;  ///< bytes at the front of queue_ that are out
  bool broken_ = false, hung_up_ = false;
};

}  // namespace trireme::launch
