#include "trireme/data/images/gzip.h"

#include <zlib.h>

#include <span>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/data/byte_stream.h"

namespace trireme::data {
namespace {

std::string unpack(const std::string& path, int64_t limit) {
  const auto stream = open_gzip(path);
  std::string text;
  for (;;) {
    constexpr size_t kStep = size_t{1} << 20;
    const size_t before = text.size();
    text.resize(before + kStep);
    text.resize(before + stream->read(std::span(text).subspan(before)));
    if (static_cast<int64_t>(text.size()) > limit) {
      throw DataError(
          "[data.gzip] {} unpacks to more than {} bytes, so it is not the expected file; download it again",
          path, limit);
    }
    if (text.size() == before) return text;
  }
}

}  // namespace

std::string read_unpacked(const std::string& path, int64_t limit) {
  constexpr std::string_view kMagic = "\x1f\x8b";
  std::string bytes = read_file(path);
  return bytes.starts_with(kMagic) ? unpack(path, limit) : std::move(bytes);
}

std::string packed(const std::string& text) {
  constexpr int kGzip = 16 + MAX_WBITS;  // a gzip header and trailer around the stream
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
