#include "trireme/comm/peer_news.h"

#include <fmt/format.h>

#include <utility>

#include "trireme/comm/progress_board.h"

namespace trireme::comm {

PeerNews::PeerNews(const std::vector<ProcessId>& processes, std::shared_ptr<ProgressBoard> board)
    : board_(std::move(board)) {
  const ProcessId own = own_process();
  for (size_t rank = 0; rank < processes.size(); ++rank) {
    const ProcessId& process = processes[rank];
    const bool is_known = process.pid > 0 && process.started != 0 && process.host == own.host;
    if (is_known && process.pid != own.pid) neighbours_.emplace(static_cast<int64_t>(rank), process);
  }
}

std::string PeerNews::about(const std::vector<int64_t>& ranks) const noexcept {
  try {
    for (const int64_t rank : ranks) {
      const auto found = neighbours_.find(rank);
      if (found == neighbours_.end()) continue;
      const ProcessId& process = found->second;
      if (started_at(process.pid) != process.started)
        return fmt::format("rank {} (process {}) is no longer running", rank, process.pid);
    }
    return board_->heard_about(ranks);
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace trireme::comm
