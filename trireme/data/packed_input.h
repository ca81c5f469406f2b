#pragma once
// The file below a ByteStream, read in pieces.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"

namespace trireme::data {

class PackedInput {
 public:
  /// `buffer_bytes` are read at once. Throws DataError, as more() does, naming the file and `format`, when it
  /// cannot be read.
  PackedInput(std::string path, std::string format, size_t buffer_bytes)
      : path_(std::move(path)),
        format_(std::move(format)),
        file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)),
        buffer_(buffer_bytes) {
    if (!file_)
      throw DataError("[data.{}] cannot read {}: {}; make the file readable, or remove it from the folder",
                      format_, path_, errno_text(errno));
  }

  /// Bytes that were read and not yet used.
  std::span<const char> rest() const { return rest_; }
  void use(size_t bytes) { rest_ = rest_.subspan(bytes); }
  /// Whether there is a rest(), for which this reads once all is used.
  bool more() {
    if (!rest_.empty()) return true;
    ssize_t count;
    do {
      count = ::read(file_.get(), buffer_.data(), buffer_.size());
    } while (count < 0 && errno == EINTR);
    if (count < 0)
      throw DataError("[data.{}] cannot read {}: {}; check its disk", format_, path_, errno_text(errno));
    read_ += count;
    rest_ = std::span(buffer_).first(static_cast<size_t>(count));
    return count > 0;
  }
  /// Bytes of the file that were used.
  int64_t used() const { return read_ - static_cast<int64_t>(rest_.size()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_, format_;
  Descriptor file_;
  std::vector<char> buffer_;
  std::span<const char> rest_;
  int64_t read_ = 0;
};

}  // namespace trireme::data
