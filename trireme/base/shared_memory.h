#pragma once
// Memory that processes of one host share by its descriptor. It has no name in a file system: the kernel
// frees it when nobody holds or maps it any more.
#include <cstddef>

#include "trireme/base/descriptor.h"

namespace trireme {

/// `bytes` of zeros, to be mapped; closes on exec. `name` is for people who look into /proc. None, with the
/// reason in errno, where there is not so much memory.
Descriptor make_shared_memory(const char* name, size_t bytes);

/// Maps the first `bytes` of it for reading and writing; nullptr, with the reason in errno, when that fails.
void* map_shared_memory(const Descriptor& memory, size_t bytes);

}  // namespace trireme
