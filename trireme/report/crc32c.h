#pragma once
// CRC-32C (Castagnoli polynomial, RFC 3720 appendix B.4), the checksum that TFRecord files frame their
// records with.
#include <cstdint>
#include <string_view>

namespace trireme::report {

uint32_t crc32c(std::string_view bytes);

/// crc32c rotated right by 15 bits plus a constant: how TFRecord stores it, so that a checksum of data that
/// itself holds checksums stays strong (tensorflow/core/lib/hash/crc32c.h).
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace trireme::report
