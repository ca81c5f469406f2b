#pragma once
// The bytes inside a packed file, as they are read from the disk: memory holds a buffer and not the file.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace trireme::data {

class ByteStream {
 public:
  virtual ~ByteStream() = default;
  ByteStream(const ByteStream&) = delete;
  ByteStream& operator=(const ByteStream&) = delete;
  /// Fills `out` from its beginning; returns how many bytes there were, 0 at the end. Throws DataError naming
  /// the file when it is damaged, cut off or packed otherwise, or its disk fails.
  virtual size_t read(std::span<char> out) = 0;
  /// Bytes of the packed file that were read so far.
  virtual int64_t taken() const = 0;

 protected:
  ByteStream() = default;
};

/// The text of a file packed by gzip, with any number of members, and zeros behind them. Other bytes behind
/// them are damage, of which gzip(1) only warns: what they were meant to be would be missing from the text.
/// Throws EnvironmentError where this build has no zlib, DataError where the file cannot be read.
std::unique_ptr<ByteStream> open_gzip(const std::string& path);

/// The text of a file packed by zstd, with any number of frames, whose windows may have 2 GiB: zstd
/// --long=31. Memory holds a window. Throws as open_gzip() does, and OutOfMemory where there is none for the
/// window.
std::unique_ptr<ByteStream> open_zstd(const std::string& path);

}  // namespace trireme::data
