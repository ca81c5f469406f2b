#pragma once
// Links between GPUs. Internal to this room.
#include <memory>

#include "trireme/comm/link.h"

namespace trireme::comm {

class Group;

/// Over a group of two, the sender first, that nobody else uses. Throws LogicError in a build without CUDA.
std::shared_ptr<Link> make_gpu_link(std::shared_ptr<Group> pair);

}  // namespace trireme::comm
