#pragma once
// What a library threw, in one line.
#include <exception>
#include <string>

namespace trireme::comm {

/// The first line of the message, without backtraces and source places.
std::string cause_of(const std::exception& error);

/// Whether the message speaks of a deadline that passed and not of a lost connection.
bool is_timeout(const std::string& cause);

}  // namespace trireme::comm
