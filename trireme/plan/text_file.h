#pragma once
// Texts that a user names: configs and schedules, of a size that somebody could have written.
#include <cstddef>
#include <string>

namespace trireme::plan {

/// The file's bytes. Throws ConfigError when there are more than `limit`, which may have no end, and
/// EnvironmentError naming path and cause when it cannot be read.
std::string read_text_file(const std::string& path, size_t limit);

}  // namespace trireme::plan
