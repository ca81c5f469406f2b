#include "trireme/plan/cost.h"

#include "trireme/base/error.h"

namespace trireme::plan {

int64_t wire_bytes(Collective collective, int64_t bytes, int64_t ranks) {
  TRIREME_CHECK(bytes >= 0 && ranks >= 1, "[plan.cost] bytes={} must be at least 0 and ranks={} at least 1",
                bytes, ranks);
  switch (collective) {
    case Collective::kAllReduce:
      return 2 * (bytes - bytes / ranks);
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
    case Collective::kGather:
    case Collective::kScatter:
      return bytes - bytes / ranks;
    case Collective::kBroadcast:
    case Collective::kReduce:
      return ranks == 1 ? 0 : bytes;
    case Collective::kSend:
      return bytes;
    case Collective::kRecv:
    case Collective::kBarrier:
      return 0;
  }
  throw LogicError("[plan.cost] unknown collective {}", static_cast<int>(collective));
}

int64_t steps(Collective collective, int64_t ranks) {
  TRIREME_CHECK(ranks >= 1, "[plan.cost] ranks={} must be at least 1", ranks);
  switch (collective) {
    case Collective::kAllReduce:
      return 2 * (ranks - 1);
    case Collective::kAllGather:
    case Collective::kReduceScatter:
    case Collective::kAllToAll:
      return ranks - 1;
    case Collective::kSend:
    case Collective::kRecv:
      return 1;
    case Collective::kBroadcast:
    case Collective::kReduce:
    case Collective::kGather:
    case Collective::kScatter:
    case Collective::kBarrier:
      return ranks == 1 ? 0 : 1;
  }
  throw LogicError("[plan.cost] unknown collective {}", static_cast<int>(collective));
}

}  // namespace trireme::plan
