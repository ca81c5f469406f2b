#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/data/images/gzip.h"

namespace trireme::data {

std::string read_unpacked(const std::string& path, int64_t) {
  std::string bytes = read_file(path);
  if (bytes.starts_with("\x1f\x8b")) {
    throw EnvironmentError(
        "[data.gzip] {} is compressed, but this build has no zlib; unpack it with gzip -d, or install "
        "zlib1g-dev and rebuild",
        path);
  }
  return bytes;
}

std::string packed(const std::string&) {
  throw EnvironmentError("[data.gzip] this build has no zlib; install zlib1g-dev and rebuild");
}

}  // namespace trireme::data
