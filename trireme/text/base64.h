#pragma once
#include <optional>
#include <string>
#include <string_view>

namespace trireme::text {

/// The bytes that `text` spells in base64 (RFC 4648, section 4); nothing where it is none.
std::optional<std::string> decode_base64(std::string_view text);

}  // namespace trireme::text
