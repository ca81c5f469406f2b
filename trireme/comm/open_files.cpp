#include "trireme/comm/open_files.h"

#include <sys/resource.h>

#include <cstdint>
#include <filesystem>
#include <system_error>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

/// What failed may have closed a few since.
constexpr int64_t kFew = 8;

int64_t open_descriptors() {
  std::error_code error;
  int64_t count = 0;
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end; !error && entry != end;
       entry.increment(error)) {
    ++count;
  }
  // A directory that cannot be opened for want of descriptors is the clearest answer.
  return error == std::errc::too_many_files_open ? INT32_MAX : count;
}

}  // namespace

void throw_if_out_of_descriptors(const std::string& op) {
  require_descriptors(op, 0);
}

void require_descriptors(const std::string& op, int64_t peers) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
  if (open_descriptors() + kFew + peers < static_cast<int64_t>(limit.rlim_cur)) return;
  throw EnvironmentError(
      "[{}] this process may have {} files and sockets open, and needs more: one for every other rank of "
      "each group, and some 40 beside; raise the limit (ulimit -n)",
      op, limit.rlim_cur);
}

}  // namespace trireme::comm
