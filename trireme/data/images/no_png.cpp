#include "trireme/base/error.h"
#include "trireme/data/images/codec.h"

namespace trireme::data {
namespace {

[[noreturn]] void refuse_png() {
  throw EnvironmentError("[data.images] this build has no PNG support; install libpng-dev and rebuild");
}

}  // namespace

Image decode_png(std::span<const std::byte>, const DecodeOptions&) {
  refuse_png();
}

std::string encode_png(const Image&) {
  refuse_png();
}

}  // namespace trireme::data
