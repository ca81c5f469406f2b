#pragma once
// Links between ranks on CPUs. A thread moves the bytes, so that tensors travel while the host computes, and
// a sender is never held up by a receiver that is late. Internal to this room.
#include <cstdint>
#include <memory>
#include <string>

#include "trireme/comm/byte_stream.h"
#include "trireme/comm/link.h"

namespace trireme::comm {

class PeerNews;
class ProgressBoard;

/// One end of a link that is about to be made.
struct LinkEnd {
  std::string name;  ///< "0->1"
  int64_t from = 0, to = 0;
  bool sends = false;
  double timeout_s = 0.0;
  std::shared_ptr<ProgressBoard> board;
  std::shared_ptr<PeerNews> news;

  int64_t rank() const { return sends ? from : to; }
  int64_t peer() const { return sends ? to : from; }
};

std::shared_ptr<Link> make_host_link(LinkEnd end, std::unique_ptr<ByteStream> stream);

}  // namespace trireme::comm
