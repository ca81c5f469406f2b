#include <zlib.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/data/byte_stream.h"
#include "trireme/data/packed_input.h"

namespace trireme::data {
namespace {

constexpr size_t kInputBytes = size_t{1} << 18;
constexpr size_t kMostAtOnce = size_t{1} << 30;  // zlib counts in an unsigned int
constexpr int kGzip = 16 + MAX_WBITS;            // a gzip header and trailer around the stream
constexpr char kFirstByte = '\x1f';              // of each member

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

class GzipStream final : public ByteStream {
 public:
  explicit GzipStream(const std::string& path) : input_(path, "gzip", kInputBytes) {
    if (input_.more() && input_.rest().front() != kFirstByte) refuse_other_format();
  }

  size_t read(std::span<char> out) override {
    const size_t wanted = std::min(out.size(), kMostAtOnce);
    size_t made = 0;
    while (made == 0 && has_member()) made = inflate_into(out.first(wanted));
    return made;
  }

  int64_t taken() const override { return input_.used(); }

 private:
  /// Whether a member goes on or begins. Zeros may follow the last one, as tapes have them up to the end of a
  /// block; gzip(1) ignores these, too.
  bool has_member() {
    if (inside_) return true;
    if (!input_.more()) return false;
    if (input_.rest().front() == kFirstByte) {
      inflateReset(&inflater_.stream);
      inside_ = true;
      return true;
    }
    const int64_t end = input_.used();
    while (input_.more()) {
      if (input_.rest().front() != '\0') refuse_garbage(end);
      input_.use(1);
    }
    return false;
  }

  size_t inflate_into(std::span<char> out) {
    if (!input_.more()) throw DataError("[data.gzip] {} is truncated; download it again", input_.path());
    z_stream& stream = inflater_.stream;
    const std::span<const char> rest = input_.rest();
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(rest.data()));  // zlib only reads it
    stream.avail_in = static_cast<uInt>(rest.size());
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    const int result = inflate(&stream, Z_NO_FLUSH);
    input_.use(rest.size() - stream.avail_in);
    if (result == Z_STREAM_END) {
      inside_ = false;
      ++members_;
    } else if (result != Z_OK && result != Z_BUF_ERROR) {
      refuse_damage();
    }
    return out.size() - stream.avail_out;
  }

  [[noreturn]] void refuse_other_format() const {
    throw DataError("[data.gzip] {} is not packed by gzip; give it the name of what it is", input_.path());
  }
  [[noreturn]] void refuse_garbage(int64_t end) const {
    throw DataError(
        "[data.gzip] {} has bytes behind the end of its gzip data at byte {} that are not packed by gzip; "
        "download it again, or cut them off with head -c {}",
        input_.path(), end, end);
  }
  [[noreturn]] void refuse_damage() const {
    if (members_ == 0 && inflater_.stream.total_in <= 2) refuse_other_format();
    throw DataError("[data.gzip] {} is damaged near byte {}; download it again", input_.path(), taken());
  }

  PackedInput input_;
  Inflater inflater_;
  bool inside_ = true;   ///< a member
  int64_t members_ = 0;  ///< that have ended
};

}  // namespace

std::unique_ptr<ByteStream> open_gzip(const std::string& path) {
  return std::make_unique<GzipStream>(path);
}

}  // namespace trireme::data
