#include "trireme/base/error.h"
#include "trireme/data/images/codec.h"

namespace trireme::data {
namespace {

[[noreturn]] void refuse_jpeg() {
  throw EnvironmentError(
      "[data.images] this build reads and writes no JPEG; install libjpeg-dev and build again");
}

}  // namespace

Image decode_jpeg(std::span<const std::byte>, const DecodeOptions&) {
  refuse_jpeg();
}

std::string encode_jpeg(const Image&, int, int) {
  refuse_jpeg();
}

}  // namespace trireme::data
