#pragma once
// Whether other ranks can still be waited for: a process of this host that has ended, or a rank of any host
// that has published a failure. A GPU waits for a lost peer until it is told. Internal to this room.
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/process_id.h"

namespace trireme::comm {

class ProgressBoard;

class PeerNews {
 public:
  /// `processes` by rank.
  PeerNews(const std::vector<ProcessId>& processes, std::shared_ptr<ProgressBoard> board);

  /// "rank 2 (process 77) has died", about the first of `ranks` that is lost; empty while none is known to
  /// be. Asks the kernel for each process of this host, and reads the files of some in /proc: of 8 ranks at
  /// once all, of more all within several calls. Does not throw; any thread may call.
  std::string about(const std::vector<int64_t>& ranks) const noexcept;

 private:
  std::map<int64_t, ProcessId> neighbours_;  ///< by rank: other processes of this host
  std::shared_ptr<ProgressBoard> board_;
  mutable std::atomic<size_t> looks_{0};
};

}  // namespace trireme::comm
