#include "trireme/comm/peer_news.h"

#include <fmt/format.h>

#include "trireme/comm/progress_board.h"

namespace trireme::comm {

std::string PeerNews::about(const std::vector<int64_t>& ranks) const noexcept {
  try {
    for (const int64_t rank : ranks) {
      const ProcessId& process = processes_.at(static_cast<size_t>(rank));
      if (has_died(process)) return fmt::format("rank {} (process {}) has died", rank, process.pid);
    }
    return board_->heard_about(ranks);
  } catch (const std::exception&) {
    return {};
  }
}

}  // namespace trireme::comm
