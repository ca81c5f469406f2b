#include "trireme/text/byte_level.h"

#include <array>

#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr uint32_t kFirstStandIn = 256;  // bytes without a printable character take those from here on
constexpr uint32_t kAlphabetEnd = 324;
constexpr int16_t kNoByte = -1;

constexpr bool is_printable(uint32_t byte) {
  return (byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
}

constexpr std::array<uint32_t, 256> make_characters() {
  std::array<uint32_t, 256> characters{};
  uint32_t next = kFirstStandIn;
  for (uint32_t byte = 0; byte < 256; ++byte) characters[byte] = is_printable(byte) ? byte : next++;
  return characters;
}

constexpr std::array<uint32_t, 256> kCharacters = make_characters();

constexpr std::array<int16_t, kAlphabetEnd> make_bytes() {
  std::array<int16_t, kAlphabetEnd> bytes{};
  bytes.fill(kNoByte);
  for (size_t byte = 0; byte < kCharacters.size(); ++byte)
    bytes[kCharacters[byte]] = static_cast<int16_t>(byte);
  return bytes;
}

constexpr std::array<int16_t, kAlphabetEnd> kBytes = make_bytes();

}  // namespace

std::string spell_bytes(std::string_view text) {
  std::string spelled;
  spelled.reserve(2 * text.size());
  for (const char byte : text) append_utf8(spelled, kCharacters[static_cast<unsigned char>(byte)]);
  return spelled;
}

std::optional<std::string> spelled_bytes(std::string_view text) {
  std::string bytes;
  bytes.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (point.value >= kAlphabetEnd || kBytes[point.value] == kNoByte) return std::nullopt;
    bytes += static_cast<char>(kBytes[point.value]);
    i += point.length;
  }
  return bytes;
}

}  // namespace trireme::text
