#pragma once
// Links between GPUs. Internal to this room.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/host_link.h"

namespace trireme::comm {

class Group;
class PairGroups;

/// Over NCCL: a group of two, the sender first, which goes back to `pairs`. Throws LogicError in a build
/// without CUDA.
std::shared_ptr<Link> make_gpu_link(LinkEnd end, std::shared_ptr<Group> pair,
                                    std::shared_ptr<PairGroups> pairs);

/// Between processes of one host whose GPUs reach each other's memory: the sender's copy engine writes into
/// the tensor that the receiver has posted. None where that cannot be; both ends then get none.
/// exchange(text) sends a text to the other end and returns the other's.
std::shared_ptr<Link> make_gpu_copy_link(const LinkEnd& end,
                                         const std::function<std::string(const std::string& mine)>& exchange);

}  // namespace trireme::comm
