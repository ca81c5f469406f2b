#include "trireme/base/error.h"
#include "trireme/data/byte_stream.h"

namespace trireme::data {

std::unique_ptr<ByteStream> open_zstd(const std::string& path) {
  throw EnvironmentError(
      "[data.zstd] {} is compressed, but this build has no zstd; unpack it with zstd -d, or install "
      "libzstd-dev and rebuild",
      path);
}

}  // namespace trireme::data
