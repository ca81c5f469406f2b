#pragma once
// The standard streams of a command, from its first line to its exit code.
#include <string_view>

namespace trireme {

/// Opens /dev/null under the numbers of standard streams that are closed: a file that is opened later would
/// get such a number, and with it all that is printed. stdout is opened for reading alone, so that results
/// without a place to go are still an error.
void hold_standard_streams();

/// Writes what stdout still holds. Returns `code`, or kEnvironment instead of 0 when something printed did
/// not arrive, which it says on stderr. A reader that has left, such as `head`, is no error.
int flush_results(int code);

/// The other end of the pipe or socket behind `fd` is closed.
bool reader_left(int fd);

/// Writes to stderr in one write call; a stderr that takes nothing is no error.
void write_stderr(std::string_view text);

}  // namespace trireme
