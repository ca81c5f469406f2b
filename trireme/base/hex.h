#pragma once
// Bytes as text, two lower-case hex digits each.
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace trireme {

std::string to_hex(const void* data, size_t size);
/// The bytes that to_hex() has written; none for any other text.
std::optional<std::string> from_hex(std::string_view text);

}  // namespace trireme
