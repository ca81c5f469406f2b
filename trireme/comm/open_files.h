#pragma once
// Libraries tell of a process that is out of descriptors in many words, and rarely in the right ones.
// Internal to this room.
#include <cstdint>
#include <string>

namespace trireme::comm {

/// Throws EnvironmentError, opening with `op` ("comm.join"), when hardly a descriptor is left to this
/// process: then that is why a connection has failed.
void throw_if_out_of_descriptors(const std::string& op);

/// Throws the same before `op` connects this process to `peers` others, when it cannot open that many
/// sockets and a few files more. Threads of torch that find none left end the process without a word.
void require_descriptors(const std::string& op, int64_t peers);

}  // namespace trireme::comm
