#pragma once
// Libraries tell of a process that is out of descriptors in many words, and rarely in the right ones.
// Internal to this room.
#include <string>

namespace trireme::comm {

/// Throws EnvironmentError, opening with `op` ("comm.join"), when hardly a descriptor is left to this
/// process: then that is why a connection has failed.
void throw_if_out_of_descriptors(const std::string& op);

}  // namespace trireme::comm
