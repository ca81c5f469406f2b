#pragma once
// A keyed hash, HMAC-SHA256 (FIPS 180-4, RFC 2104), and what goes with it where two processes prove to each
// other that they know a secret. Written out here, since GPU machines have no network to fetch a library
// from.
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace trireme::controller {

inline constexpr size_t kDigestBytes = 32;

/// SHA-256 of `message`, as 32 bytes.
std::string sha256(std::string_view message);

/// HMAC-SHA256 of `message` under `key`, as 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view message);

/// Whether the two are equal; takes as long wherever they differ first.
bool equal_in_constant_time(std::string_view a, std::string_view b);

/// Bytes of the kernel that nobody can guess. Throws EnvironmentError.
std::string random_bytes(size_t count);

}  // namespace trireme::controller
