// Checks of the host that need no worker.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>

#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/cli/doctor.h"
#include "trireme/cli/folder_check.h"
#include "trireme/cli/words.h"
#include "trireme/plan/world.h"
#include "trireme/report/machine.h"

namespace trireme::cli {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr int64_t kGiB = int64_t{1} << 30;

std::optional<int64_t> as_number(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return std::nullopt;
  return value;
}

/// The blank-separated words of a small file; none when it cannot be read.
std::vector<std::string> words_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> words;
  for (std::string word; file >> word;) words.push_back(word);
  return words;
}

/// This process's folder in the cgroup hierarchy of `controller` (v1), or in the unified one (v2, "").
std::string cgroup_folder(const std::string& controller) {
  std::ifstream file("/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::vector<std::string> parts = split(line, ':');
    if (parts.size() == 3 && parts[1] == controller && parts[2] != "/") return parts[2];
  }
  return "";
}

/// Words of a cgroup file: the process's own folder, else the root, which is where containers see their
/// limits.
std::vector<std::string> cgroup_words(const std::string& controller, const std::string& name) {
  const std::string root = controller.empty() ? "/sys/fs/cgroup" : "/sys/fs/cgroup/" + controller;
  const auto own = words_of(root + cgroup_folder(controller) + "/" + name);
  return own.empty() ? words_of(root + "/" + name) : own;
}

/// CPUs that the cgroup's quota grants; nothing without a quota.
std::optional<double> cgroup_cores() {
  std::vector<std::string> words = cgroup_words("", "cpu.max");
  if (words.size() < 2) {
    words = cgroup_words("cpu", "cpu.cfs_quota_us");
    const auto period = cgroup_words("cpu", "cpu.cfs_period_us");
    words.insert(words.end(), period.begin(), period.end());
  }
  if (words.size() < 2) return std::nullopt;
  const auto quota = as_number(words[0]);
  const auto period = as_number(words[1]);
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

/// The cgroup's memory limit; nothing when it is none or above the host's memory.
std::optional<int64_t> cgroup_memory(int64_t host_bytes) {
  std::vector<std::string> words = cgroup_words("", "memory.max");
  if (words.empty()) words = cgroup_words("memory", "memory.limit_in_bytes");
  const auto limit = words.empty() ? std::nullopt : as_number(words[0]);
  return limit && *limit < host_bytes ? limit : std::nullopt;
}

Check check_cores(const Environment& environment) {
  const int64_t affinity = report::describe_machine().cores;
  const auto quota = cgroup_cores();
  const int64_t usable =
      quota ? std::clamp<int64_t>(static_cast<int64_t>(std::ceil(*quota)), 1, affinity) : affinity;
  Check check{.name = "cores", .found = fmt::format("{} usable", affinity), .fix = ""};
  if (quota) check.found += fmt::format(", cgroup quota {:.1f}", *quota);
  const auto threads = environment.get("OMP_NUM_THREADS");
  check.found += ", OMP_NUM_THREADS " + threads.value_or("unset");
  const auto count = threads ? as_number(*threads) : std::nullopt;
  if ((threads && !count) || count.value_or(1) > usable || count.value_or(1) < 1) {
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format("unset OMP_NUM_THREADS, or set it to 1..{}", usable);
  } else if (!threads && usable < affinity) {
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format(
        "export OMP_NUM_THREADS={}: without it the ranks divide {} cores, more than the quota gives", usable,
        affinity);
  }
  return check;
}

int64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("MemAvailable:")) continue;
    const size_t digit = line.find_first_of("0123456789");
    return digit == std::string::npos ? 0 : as_number(line.substr(digit)).value_or(0) * 1024;
  }
  return 0;
}

Check check_memory() {
  const int64_t host = report::describe_machine().memory_bytes;
  const auto limit = cgroup_memory(host);
  const int64_t available = std::min(available_memory(), limit.value_or(host));
  Check check{
      .name = "memory", .found = bytes_text(available) + " available of " + bytes_text(host), .fix = ""};
  if (limit) check.found += ", cgroup limit " + bytes_text(*limit);
  if (available < kGiB) {
    check.verdict = Verdict::kWarn;
    check.fix = "close other programs, or train with fewer ranks";
  }
  return check;
}

Check check_shared_memory() {
  constexpr int64_t kNeeded = 512 * kMiB;
  struct statvfs info {};
  if (::statvfs("/dev/shm", &info) != 0) {
    return {.name = "/dev/shm",
            .verdict = Verdict::kWarn,
            .found = errno_text(errno),
            .fix = "mount a tmpfs at /dev/shm"};
  }
  const auto size = static_cast<int64_t>(info.f_blocks * info.f_frsize);
  if (size >= kNeeded) return {.name = "/dev/shm", .found = bytes_text(size), .fix = ""};
  return {.name = "/dev/shm",
          .verdict = Verdict::kWarn,
          .found = fmt::format("{}, less than {}", bytes_text(size), bytes_text(kNeeded)),
          .fix = "start the container with --shm-size=1g"};
}

/// A resource limit of this process, `unlimited` as nothing.
std::optional<int64_t> soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  getrlimit(resource, &limit);
  if (limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return static_cast<int64_t>(limit.rlim_cur);
}

Check check_open_files() {
  constexpr int64_t kNeeded = 1024;
  const auto limit = soft_limit(RLIMIT_NOFILE);
  Check check{.name = "open files", .found = limit ? with_commas(*limit) : "unlimited", .fix = ""};
  if (limit && *limit < kNeeded) {
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format("ulimit -n {}", kNeeded);
  }
  return check;
}

/// Matters to GPUs only: NCCL pins host memory for its network and shared-memory transports.
Check check_locked_memory(int gpus) {
  constexpr int64_t kNeeded = 64 * kMiB;
  const auto limit = soft_limit(RLIMIT_MEMLOCK);
  Check check{.name = "locked memory", .found = limit ? bytes_text(*limit) : "unlimited", .fix = ""};
  if (gpus > 0 && limit && *limit < kNeeded) {
    check.verdict = Verdict::kWarn;
    check.fix = "ulimit -l unlimited (containers: --ulimit memlock=-1)";
  }
  return check;
}

Check check_disk(const std::string& runs_root) {
  const std::string place = existing_parent(runs_root).string();
  Check check{.name = "run folder", .found = place, .fix = ""};
  struct statvfs info {};
  if (!can_hold_files(runs_root) || ::statvfs(place.c_str(), &info) != 0) {
    check.verdict = Verdict::kFail;
    check.found += " is not writable";
    check.fix = "choose another folder with --run-dir or TRIREME_RUN_DIR";
    return check;
  }
  const auto available = static_cast<int64_t>(info.f_bavail * info.f_frsize);
  check.found += fmt::format(", {} free", bytes_text(available));
  if (available >= kGiB) return check;
  check.verdict = available < 16 * kMiB ? Verdict::kFail : Verdict::kWarn;
  check.fix = "free some space, or choose another folder with --run-dir";
  return check;
}

/// Binds a port of the loopback interface, as every local run does.
Check check_loopback() {
  Check check{.name = "loopback", .found = "a port of 127.0.0.1 can be bound", .fix = ""};
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool bound = socket &&
                     ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
                     ::listen(socket.get(), 1) == 0;
  if (!bound) {
    check.verdict = Verdict::kFail;
    check.found = "no port of 127.0.0.1 can be bound: " + errno_text(errno);
    check.fix = "bring the interface up: ip link set lo up";
  }
  return check;
}

Check check_launcher(const Environment& environment) {
  try {
    const plan::WorldSpec world = plan::detect_world(environment);
    if (world.launcher == "none") {
      return {.name = "launcher", .found = "none; 'trireme train -n N' starts its own ranks", .fix = ""};
    }
    return {.name = "launcher",
            .found = fmt::format("{}: rank {} of {}", plan::launcher_in_words(world.launcher), world.rank,
                                 world.world_size),
            .fix = ""};
  } catch (const Error& error) {
    return {.name = "launcher",
            .verdict = Verdict::kFail,
            .found = error.what(),
            .fix = "unset the variables left over from another job"};
  }
}

}  // namespace

std::vector<Check> check_machine(const Environment& environment, const std::string& runs_root, int gpus) {
  std::vector<Check> checks = {
      check_cores(environment),  check_memory(),        check_shared_memory(), check_open_files(),
      check_locked_memory(gpus), check_disk(runs_root), check_loopback(),      check_launcher(environment)};
  std::ranges::move(check_variables(environment, describe_network(gpus)), std::back_inserter(checks));
  return checks;
}

}  // namespace trireme::cli
