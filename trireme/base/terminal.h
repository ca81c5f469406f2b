#pragma once
// The terminal behind a descriptor.
#include <cstdint>

namespace trireme {

/// Columns of the terminal behind `fd` as they are now; 80 where it does not tell, 0 when `fd` is no
/// terminal.
int64_t terminal_columns(int fd);

}  // namespace trireme
