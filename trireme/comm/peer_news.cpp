#include "trireme/comm/peer_news.h"

#include <fmt/format.h>

#include <cerrno>
#include <csignal>
#include <utility>

#include "trireme/comm/progress_board.h"

namespace trireme::comm {

namespace {

/// A process that has ended, and was not waited for yet, has to be looked up in /proc. Ranks that wait
/// together would spend their time there, were each to look for all others each time.
constexpr size_t kLooksAtOnce = 8;

}  // namespace

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
    const size_t first = looks_.fetch_add(1) * kLooksAtOnce;
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int64_t rank = ranks[i];
      const auto found = neighbours_.find(rank);
      if (found == neighbours_.end()) continue;
      const ProcessId& process = found->second;
      const bool gone = ::kill(process.pid, 0) != 0 && errno == ESRCH;
      const bool in_turn = (i + ranks.size() - first % ranks.size()) % ranks.size() < kLooksAtOnce;
      if (gone || (in_turn && started_at(process.pid) != process.started))
        return fmt::format("rank {} (process {}) is no longer running", rank, process.pid);
    }
    return board_->heard_about(ranks);
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace trireme::comm
