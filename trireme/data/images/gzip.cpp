#include "trireme/data/images/gzip.h"

#include <zlib.h>

#include <algorithm>
#include <span>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::data {
namespace {

constexpr int kGzip = 16 + MAX_WBITS;  // a gzip header and trailer around the stream

/// Ends zlib's state with the scope.
class Inflater {
 public:
  Inflater() {
    TRIREME_CHECK(inflateInit2(&stream, kGzip) == Z_OK, "[data.gzip] zlib cannot be initialized");
  }
  ~Inflater() { inflateEnd(&stream); }
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;
  z_stream stream = {};
};

bool is_gzip(const std::string& bytes) {
  return bytes.starts_with("\x1f\x8b");
}

std::string unpack(const std::string& bytes, const std::string& path, int64_t limit) {
  Inflater inflater;
  z_stream& stream = inflater.stream;
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));  // zlib only reads it
  stream.avail_in = static_cast<uInt>(bytes.size());
  std::string text;
  for (;;) {
    constexpr size_t kStep = size_t{1} << 20;
    const size_t before = text.size();
    text.resize(before + kStep);
    stream.next_out = reinterpret_cast<Bytef*>(text.data() + before);
    stream.avail_out = static_cast<uInt>(kStep);
    const int result = inflate(&stream, Z_NO_FLUSH);
    text.resize(before + kStep - stream.avail_out);
    if (static_cast<int64_t>(text.size()) > limit) {
      throw DataError(
          "[data.gzip] {} unpacks to more than {} bytes, so it is not the expected file; download it again",
          path, limit);
    }
    if (result == Z_STREAM_END) {
      const auto rest = std::span(stream.next_in, stream.avail_in);
      if (std::ranges::all_of(rest, [](Bytef byte) { return byte == 0; })) return text;  // as gzip does
      inflateReset(&stream);  // a file may hold several members
    } else if (result != Z_OK) {
      throw DataError("[data.gzip] {} is {} after {} of {} bytes; download it again", path,
                      result == Z_BUF_ERROR ? "truncated" : "damaged", bytes.size() - stream.avail_in,
                      bytes.size());
    }
  }
}

}  // namespace

std::string read_unpacked(const std::string& path, int64_t limit) {
  std::string bytes = read_file(path);
  if (bytes.size() >= size_t{1} << 32)
    throw DataError("[data.gzip] {} is larger than the limit of 4 GiB", path);
  return is_gzip(bytes) ? unpack(bytes, path, limit) : std::move(bytes);
}

std::string packed(const std::string& text) {
  z_stream stream = {};
  TRIREME_CHECK(deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, kGzip, 8, Z_DEFAULT_STRATEGY) == Z_OK,
                "[data.gzip] zlib cannot be initialized");
  std::string bytes(deflateBound(&stream, static_cast<uLong>(text.size())), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(bytes.data());
  stream.avail_out = static_cast<uInt>(bytes.size());
  const int result = deflate(&stream, Z_FINISH);
  bytes.resize(stream.total_out);
  deflateEnd(&stream);
  TRIREME_CHECK(result == Z_STREAM_END, "[data.gzip] zlib failed to compress {} bytes: error {}", text.size(),
                result);
  return bytes;
}

}  // namespace trireme::data
