#pragma once
// GPT-2's alphabet of 256 printable characters for the 256 bytes (Radford et al. 2019, encoder.py): with it a
// vocabulary of bytes is one of texts.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace trireme::text {

/// The bytes of `text`, each as its character.
std::string spell_bytes(std::string_view text);
/// The bytes that `text` spells; nothing where a character is not of the alphabet.
std::optional<std::string> spelled_bytes(std::string_view text);

}  // namespace trireme::text
