#include <fcntl.h>
#include <unistd.h>
#include <zstd.h>

#include <cerrno>
#include <vector>

#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/data/byte_stream.h"

namespace trireme::data {
namespace {

using ZstdState =
    std::unique_ptr<ZSTD_DStream, decltype([](ZSTD_DStream* state) { ZSTD_freeDStream(state); })>;

class ZstdStream final : public ByteStream {
 public:
  explicit ZstdStream(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)), buffer_(ZSTD_DStreamInSize()) {
    if (!file_)
      throw DataError("[data.zstd] cannot read {}: {}; make the file readable, or remove it from the folder",
                      path, errno_text(errno));
    TRIREME_CHECK(state_, "[data.zstd] the library cannot be initialized");
  }

  size_t read(std::span<char> out) override {
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    while (output.pos == 0) {
      if (input_.pos == input_.size && !fill() && !holds_output_) {
        if (inside_frame_) throw DataError("[data.zstd] {} is truncated; download it again", path_);
        return 0;
      }
      const size_t hint = ZSTD_decompressStream(state_.get(), &output, &input_);
      if (ZSTD_isError(hint) != 0) {
        throw DataError("[data.zstd] {} is damaged near byte {} ({}); download it again", path_, taken(),
                        ZSTD_getErrorName(hint));
      }
      inside_frame_ = hint != 0;
      holds_output_ = inside_frame_ && output.pos == output.size;
    }
    return output.pos;
  }

  int64_t taken() const override { return read_ - static_cast<int64_t>(input_.size - input_.pos); }

 private:
  /// Whether there were more bytes in the file.
  bool fill() {
    ssize_t count;
    do {
      count = ::read(file_.get(), buffer_.data(), buffer_.size());
    } while (count < 0 && errno == EINTR);
    if (count < 0)
      throw DataError("[data.zstd] cannot read {}: {}; check its disk", path_, errno_text(errno));
    read_ += count;
    input_ = {buffer_.data(), static_cast<size_t>(count), 0};
    return count > 0;
  }

  std::string path_;
  Descriptor file_;
  std::vector<char> buffer_;
  ZstdState state_{ZSTD_createDStream()};
  ZSTD_inBuffer input_{nullptr, 0, 0};
  int64_t read_ = 0;  ///< bytes of the file
  bool inside_frame_ = false;
  bool holds_output_ = false;  ///< the library, of bytes that it has taken
};

}  // namespace

std::unique_ptr<ByteStream> open_zstd(const std::string& path) {
  return std::make_unique<ZstdStream>(path);
}

}  // namespace trireme::data
