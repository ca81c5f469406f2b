#pragma once
// The one implementation of Group: counts, checks, hands over to a torch backend, keeps the deadline,
// explains failures. Internal to this room; World::make_group() makes it.
#include <memory>

#include "trireme/comm/backend.h"
#include "trireme/comm/group.h"
#include "trireme/comm/peer_memory.h"

namespace trireme::comm {

class PeerNews;
class ProgressBoard;

/// A group of one needs neither backend, board nor news; `peers` is for groups that have it. Takes over
/// `spec` but for its store.
std::shared_ptr<Group> make_backend_group(BackendSpec spec, c10::intrusive_ptr<c10d::Backend> backend,
                                          std::unique_ptr<PeerMemory> peers,
                                          std::shared_ptr<ProgressBoard> board,
                                          std::shared_ptr<PeerNews> news);

}  // namespace trireme::comm
