#include <zstd.h>
#include <zstd_errors.h>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/data/byte_stream.h"
#include "trireme/data/packed_input.h"

namespace trireme::data {
namespace {

using ZstdState =
    std::unique_ptr<ZSTD_DStream, decltype([](ZSTD_DStream* state) { ZSTD_freeDStream(state); })>;

/// The largest window that this library unpacks: 2 GiB on machines of 64 bits.
int largest_window_log() {
  return ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound;
}

class ZstdStream final : public ByteStream {
 public:
  explicit ZstdStream(const std::string& path) : input_(path, "zstd", ZSTD_DStreamInSize()) {
    TRIREME_CHECK(state_, "[data.zstd] the library cannot be initialized");
    ZSTD_DCtx_setParameter(state_.get(), ZSTD_d_windowLogMax, largest_window_log());
  }

  size_t read(std::span<char> out) override {
    ZSTD_outBuffer output{out.data(), out.size(), 0};
    while (output.pos == 0) {
      if (!input_.more() && !holds_output_) {
        if (inside_frame_) throw DataError("[data.zstd] {} is truncated; download it again", input_.path());
        return 0;
      }
      unpack(output);
    }
    return output.pos;
  }

  int64_t taken() const override { return input_.used(); }

 private:
  void unpack(ZSTD_outBuffer& output) {
    ZSTD_inBuffer given{input_.rest().data(), input_.rest().size(), 0};
    const size_t hint = ZSTD_decompressStream(state_.get(), &output, &given);
    input_.use(given.pos);
    if (ZSTD_isError(hint) != 0) refuse(hint);
    inside_frame_ = hint != 0;
    holds_output_ = inside_frame_ && output.pos == output.size;
  }

  [[noreturn]] void refuse(size_t error) const {
    const ZSTD_ErrorCode code = ZSTD_getErrorCode(error);
    if (code == ZSTD_error_frameParameter_windowTooLarge) {
      throw DataError(
          "[data.zstd] {} needs a window of more than {} of memory, which is not read; pack it again with "
          "zstd --long={} or less",
          input_.path(), format_bytes(static_cast<double>(int64_t{1} << largest_window_log())),
          largest_window_log());
    }
    if (code == ZSTD_error_memory_allocation) {
      throw OutOfMemory(
          "[data.zstd] {} was packed with zstd --long, and there is no memory for its window, which has up "
          "to {}; pack it again without --long",
          input_.path(), format_bytes(static_cast<double>(int64_t{1} << largest_window_log())));
    }
    throw DataError("[data.zstd] {} is damaged near byte {} ({}); download it again", input_.path(), taken(),
                    ZSTD_getErrorName(error));
  }

  PackedInput input_;
  ZstdState state_{ZSTD_createDStream()};
  bool inside_frame_ = false;
  bool holds_output_ = false;  ///< the library, of bytes that it has taken
};

}  // namespace

std::unique_ptr<ByteStream> open_zstd(const std::string& path) {
  return std::make_unique<ZstdStream>(path);
}

}  // namespace trireme::data
