#include "trireme/report/png.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "trireme/base/error.h"

namespace trireme::report {
namespace {

constexpr auto kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; ++bit) rest = (rest & 1U) != 0 ? rest >> 1 ^ 0xedb88320U : rest >> 1;
    table[byte] = rest;
  }
  return table;
}();

/// The CRC of the PNG standard, annex D.
uint32_t png_crc(std::string_view bytes) {
  uint32_t crc = ~0U;
  for (const char byte : bytes) crc = kCrcTable[(crc ^ static_cast<uint8_t>(byte)) & 0xffU] ^ crc >> 8;
  return ~crc;
}

/// RFC 1950.
uint32_t adler32(std::string_view bytes) {
  constexpr uint32_t kPrime = 65521;
  uint32_t a = 1, b = 0;
  for (const char byte : bytes) {
    a = (a + static_cast<uint8_t>(byte)) % kPrime;
    b = (b + a) % kPrime;
  }
  return b << 16 | a;
}

std::string four_bytes(uint32_t value) {
  std::string bytes;
  for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(value >> shift & 0xffU);
  return bytes;
}

std::string chunk(std::string_view type, const std::string& data) {
  const std::string body = std::string(type) + data;
  return four_bytes(static_cast<uint32_t>(data.size())) + body + four_bytes(png_crc(body));
}

/// A zlib stream of stored blocks (RFC 1951, 3.2.4).
std::string stored(std::string_view bytes) {
  constexpr size_t kMostStored = 65535;
  std::string stream = "\x78\x01";
  for (size_t at = 0; at < bytes.size(); at += kMostStored) {
    const std::string_view block = bytes.substr(at, kMostStored);
    stream += at + block.size() == bytes.size() ? '\1' : '\0';
    for (const size_t size : {block.size(), ~block.size()}) {
      stream += static_cast<char>(size & 0xffU);
      stream += static_cast<char>(size >> 8 & 0xffU);
    }
    stream += block;
  }
  return stream + four_bytes(adler32(bytes));
}

}  // namespace

std::string to_png(const Picture& picture) {
  const int64_t line = picture.width * picture.channels;
  TRIREME_CHECK((picture.channels == 1 || picture.channels == 3) && picture.width >= 1 &&
                    picture.height >= 1 && std::ssize(picture.pixels) == picture.height * line,
                "[report.png] {} bytes do not make a picture of {} x {} x {}", picture.pixels.size(),
                picture.height, picture.width, picture.channels);
  std::string lines;
  for (int64_t row = 0; row < picture.height; ++row) {
    lines += '\0';  // no filter
    const auto begin = picture.pixels.begin() + row * line;
    lines.append(begin, begin + line);
  }
  const std::string header = four_bytes(static_cast<uint32_t>(picture.width)) +
                             four_bytes(static_cast<uint32_t>(picture.height)) +
                             std::string({8, picture.channels == 1 ? '\0' : '\2', 0, 0, 0});
  return "\x89PNG\r\n\x1a\n" + chunk("IHDR", header) + chunk("IDAT", stored(lines)) + chunk("IEND", "");
}

Picture shrunk(const Picture& picture, int64_t most) {
  const int64_t side = (std::max(picture.width, picture.height) + most - 1) / most;
  if (side <= 1) return picture;
  // Squares at the right and the lower edge may be cut off.
  Picture small{.width = (picture.width + side - 1) / side,
                .height = (picture.height + side - 1) / side,
                .channels = picture.channels,
                .pixels = {}};
  for (int64_t y = 0; y < small.height; ++y) {
    for (int64_t x = 0; x < small.width; ++x) {
      for (int64_t channel = 0; channel < small.channels; ++channel) {
        int64_t sum = 0, count = 0;
        for (int64_t row = y * side; row < std::min(picture.height, (y + 1) * side); ++row) {
          for (int64_t column = x * side; column < std::min(picture.width, (x + 1) * side); ++column) {
            sum +=
                picture
                    .pixels[static_cast<size_t>((row * picture.width + column) * picture.channels + channel)];
            ++count;
          }
        }
        small.pixels.push_back(static_cast<uint8_t>((sum + count / 2) / count));
      }
    }
  }
  return small;
}

}  // namespace trireme::report
