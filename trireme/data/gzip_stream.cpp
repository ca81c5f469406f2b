#include <zlib.h>

#include <algorithm>
#include <cerrno>

#include "trireme/base/error.h"
#include "trireme/data/byte_stream.h"

namespace trireme::data {
namespace {

constexpr unsigned kGzipBuffer = 1U << 18;

using GzipFile = std::unique_ptr<gzFile_s, decltype([](gzFile file) { gzclose_r(file); })>;

class GzipStream final : public ByteStream {
 public:
  explicit GzipStream(const std::string& path) : path_(path), file_(gzopen(path.c_str(), "rbe")) {
    if (!file_)
      throw DataError("[data.gzip] cannot read {}: {}; make the file readable, or remove it from the folder",
                      path, errno_text(errno));
    gzbuffer(file_.get(), kGzipBuffer);
  }

  size_t read(std::span<char> out) override {
    constexpr size_t kMost = size_t{1} << 30;  // zlib counts in an int
    const auto wanted = static_cast<unsigned>(std::min(out.size(), kMost));
    const int count = gzread(file_.get(), out.data(), wanted);
    if (gzdirect(file_.get()) != 0)
      throw DataError("[data.gzip] {} is not packed by gzip; give it the name of what it is", path_);
    if (count < static_cast<int>(wanted)) check();
    return static_cast<size_t>(count);
  }

  int64_t taken() const override { return gzoffset(file_.get()); }

 private:
  /// Throws when the file ended too early or is not what its check sum says.
  void check() const {
    int error = Z_OK;
    gzerror(file_.get(), &error);
    if (error == Z_OK || error == Z_STREAM_END) return;
    if (error == Z_ERRNO)
      throw DataError("[data.gzip] cannot read {}: {}; check its disk", path_, errno_text(errno));
    throw DataError("[data.gzip] {} is {} near byte {}; download it again", path_,
                    error == Z_BUF_ERROR ? "truncated" : "damaged", taken());
  }

  std::string path_;
  GzipFile file_;
};

}  // namespace

std::unique_ptr<ByteStream> open_gzip(const std::string& path) {
  return std::make_unique<GzipStream>(path);
}

}  // namespace trireme::data
