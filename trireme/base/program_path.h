#pragma once
// The place of the program `trireme`, for programs that start it.
#include <optional>
#include <string>

#include "trireme/base/env.h"

namespace trireme {

/// The program that is named, or where `named` is empty the one beside this program or in PATH. None: it is
/// not there, or cannot be executed.
std::optional<std::string> find_trireme(const std::string& named, const Environment& environment);

/// This program's own file.
std::string own_path();

}  // namespace trireme
