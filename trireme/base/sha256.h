#pragma once
// SHA-256 (FIPS 180-4), for files from elsewhere whose sums others publish. What we write ourselves has XXH3.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace trireme {

class Sha256 {
 public:
  void update(const void* data, size_t size);
  /// 64 lower-case hex digits; ends the sum.
  std::string digest();

 private:
  void block(const unsigned char* bytes);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> rest_ = {};
  uint64_t bytes_ = 0;
};

std::string sha256(std::string_view text);

}  // namespace trireme
