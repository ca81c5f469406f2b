#pragma once
// Whether a folder can be written to, before anything runs that writes there.
#include <filesystem>
#include <string>

namespace trireme::cli {

/// `path`, or the nearest folder above it that exists.
std::filesystem::path existing_parent(const std::string& path);
/// Whether this user can write into the folder, or make it.
bool can_hold_files(const std::string& path);

}  // namespace trireme::cli
