#pragma once
// The descriptors that every launch needs: pipes and /dev/null.
#include "trireme/base/descriptor.h"

namespace trireme::launch {

struct Pipe {
  Descriptor read;   ///< never blocks: an empty pipe answers EAGAIN
  Descriptor write;  ///< blocks, as a program expects of its stdout
};

/// Both ends close on exec. Throws EnvironmentError when the process is out of descriptors.
Pipe make_pipe();

/// /dev/null for reading. Also fills descriptors 0 to 2 where they are closed, so that no pipe or socket made
/// later lands on a number that has a meaning. Throws EnvironmentError.
Descriptor open_null();

}  // namespace trireme::launch
