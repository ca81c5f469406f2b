#pragma once
// Files that may be packed by gzip.
#include <cstdint>
#include <string>

namespace trireme::data {

/// The bytes of a file, unpacked when it is a gzip file by its first bytes. Throws EnvironmentError when it
/// cannot be read, and DataError when it is damaged, cut off or would unpack to more than `limit` bytes.
std::string read_unpacked(const std::string& path, int64_t limit);

/// `text` as one gzip member without time and name, so that equal texts give equal bytes. Throws
/// EnvironmentError in a build without zlib.
std::string packed(const std::string& text);

}  // namespace trireme::data
