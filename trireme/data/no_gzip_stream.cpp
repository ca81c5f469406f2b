#include "trireme/base/error.h"
#include "trireme/data/byte_stream.h"

namespace trireme::data {

std::unique_ptr<ByteStream> open_gzip(const std::string& path) {
  throw EnvironmentError(
      "[data.gzip] {} is compressed, but this build has no zlib; unpack it with gzip -d, or install "
      "zlib1g-dev and rebuild",
      path);
}

}  // namespace trireme::data
