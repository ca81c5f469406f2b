#include "trireme/base/error.h"
#include "trireme/data/images/codec.h"

namespace trireme::data {
namespace {

[[noreturn]] void refuse_jpeg() {
  throw EnvironmentError("[data.images] this build has no JPEG support; install libjpeg-dev and rebuild");
}

}  // namespace

Image decode_jpeg(std::span<const std::byte>, const DecodeOptions&) {
  refuse_jpeg();
}

std::string encode_jpeg(const Image&, int, int) {
  refuse_jpeg();
}

}  // namespace trireme::data
