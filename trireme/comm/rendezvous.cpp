#include "trireme/comm/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/host.h"
#include "trireme/base/log.h"
#include "trireme/comm/cause.h"
#include "trireme/comm/name_server.h"
#include "trireme/comm/open_files.h"
#include "trireme/comm/process_id.h"

namespace trireme::comm {
namespace {

/// Beyond the timeout that torch is given for connecting.
constexpr double kConnectSlack_s = 0.5;

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

Addresses resolve(const std::string& host, int64_t port, int type) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) {
    throw_if_out_of_descriptors("comm.join");
    throw CommError(
        "[comm.join] host '{}' of MASTER_ADDR does not resolve ({}); set it to a name or address that "
        "resolves on every host",
        host, ::gai_strerror(status));
  }
  return {found, &::freeaddrinfo};
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (address->sa_family != AF_INET6) return false;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

std::string numeric(const sockaddr* address, socklen_t size) {
  std::array<char, NI_MAXHOST> text{};
  const int status = ::getnameinfo(address, size, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST);
  TRIREME_CHECK(status == 0, "[comm.join] getnameinfo: {}", ::gai_strerror(status));
  return text.data();
}

/// "localhost" may resolve to ::1 first on one host and to 127.0.0.1 on another. An address of IPv6 may stand
/// in brackets, as where a port follows it.
std::string canonical_host(const std::string& host) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') return host.substr(1, host.size() - 2);
  return host == "localhost" ? "127.0.0.1" : host;
}

Descriptor listen_at(const addrinfo& address) {
  Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  // A restarted job finds its port in TIME_WAIT.
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  const bool listens = ::bind(socket.get(), address.ai_addr, address.ai_addrlen) == 0 &&
                       ::listen(socket.get(), SOMAXCONN) == 0;
  return listens ? std::move(socket) : Descriptor();
}

/// The port of rank 0 is taken.
class PortInUse : public CommError {
 public:
  using CommError::CommError;
};

[[noreturn]] void throw_bind_error(const std::string& host, int64_t port, int error) {
  throw_if_out_of_descriptors("comm.join");
  if (error == EADDRINUSE) {
    throw PortInUse("[comm.join] port {} on {} is in use ({}); pick another MASTER_PORT", port, host,
                    errno_text(error));
  }
  throw CommError(
      "[comm.join] rank 0 cannot listen on {}:{} ({}); MASTER_ADDR must be an address of the host that "
      "runs rank 0",
      host, port, errno_text(error));
}

/// Debian maps a host's own name to 127.0.1.1, which ranks of other hosts cannot reach.
void warn_if_unreachable(const plan::WorldSpec& spec, const addrinfo& address) {
  const bool one_host = spec.local_world_size == 0 || spec.local_world_size >= spec.world_size;
  if (one_host || !is_loopback(address.ai_addr)) return;
  log_warning(
      "MASTER_ADDR '{}' resolves to {} here, which ranks on other hosts cannot reach (only {} of {} ranks "
      "are local); set it to the address of a network interface if they do not join",
      spec.master_addr, numeric(address.ai_addr, address.ai_addrlen), spec.local_world_size, spec.world_size);
}

Descriptor listen_on(const plan::WorldSpec& spec, const std::string& host) {
  const Addresses addresses = resolve(host, spec.master_port, SOCK_STREAM);
  int error = 0;
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    warn_if_unreachable(spec, *address);
    Descriptor socket = listen_at(*address);
    if (socket) return socket;
    error = errno;
  }
  throw_bind_error(host, spec.master_port, error);
}

int64_t port_of(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    throw CommError(
        "[comm.join] file descriptor {} is not a listening socket ({}); the launcher must pass its listening "
        "socket to rank 0 open",
        fd, errno_text(errno));
  }
  // sin_port and sin6_port have the same offset.
  return ntohs(reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

/// In numbers.
std::string listening_address(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  return numeric(reinterpret_cast<const sockaddr*>(&address), size);
}

/// An inherited socket stays open for worlds that this process joins later.
Descriptor inherited_or_own(const plan::WorldSpec& spec, const std::string& host) {
  if (spec.listen_fd < 0) return listen_on(spec, host);
  const int fd = static_cast<int>(spec.listen_fd);
  port_of(fd);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Descriptor(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

/// The address of the interface from which packets to `host` leave.
std::string own_address_towards(const std::string& host, int64_t port) {
  const Addresses addresses = resolve(host, port, SOCK_DGRAM);
  const Descriptor socket(::socket(addresses->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage own{};
  socklen_t size = sizeof own;
  // Connecting a datagram socket sends nothing; it only looks up the route.
  if (::connect(socket.get(), addresses->ai_addr, addresses->ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &size) != 0) {
    throw_if_out_of_descriptors("comm.join");
    throw CommError("[comm.join] there is no route to {} ({}); check MASTER_ADDR and the network", host,
                    errno_text(errno));
  }
  return numeric(reinterpret_cast<const sockaddr*>(&own), size);
}

c10::intrusive_ptr<c10d::Store> host_store(const std::string& host, Descriptor socket,
                                           c10d::TCPStoreOptions options) {
  options.isServer = true;
  options.port = static_cast<uint16_t>(port_of(socket.get()));
  options.masterListenFd = socket.release();
  // Two worlds at once on an inherited socket share one server: two would take each other's connections.
  options.multiTenant = true;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

c10d::TCPStoreOptions options_for(int64_t port, double timeout_s) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.waitWorkers = false;
  // torch rounds connection timeouts down to whole seconds; 0 would mean no timeout.
  options.timeout = std::chrono::milliseconds(std::llround(std::max(timeout_s, 1.0) * 1000.0));
  return options;
}

/// Results of open_store(), which runs on another thread.
struct Opened {
  std::string address;
};

bool accepts(const addrinfo& address) {
  const Descriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return true;
  constexpr int kPatience_ms = 1000;
  pollfd wait{.fd = socket.get(), .events = POLLOUT, .revents = 0};
  int error = errno;
  socklen_t size = sizeof error;
  return error == EINPROGRESS && ::poll(&wait, 1, kPatience_ms) == 1 &&
         ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0;
}

/// `host` in numbers: of several addresses the first that accepts a connection within `timeout_s`, else the
/// first of all.
std::string answering_address(const std::string& host, int64_t port, double timeout_s) {
  const Addresses addresses = resolve(host, port, SOCK_STREAM);
  const double end = monotonic_seconds() + timeout_s;
  while (addresses->ai_next != nullptr && monotonic_seconds() < end) {
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
      if (accepts(*address)) return numeric(address->ai_addr, address->ai_addrlen);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return numeric(addresses->ai_addr, addresses->ai_addrlen);
}

c10::intrusive_ptr<c10d::Store> open_store(const plan::WorldSpec& spec, const std::string& host,
                                           const std::string& prefix, bool hosts_store, double timeout_s,
                                           Opened& opened) {
  const c10d::TCPStoreOptions options = options_for(spec.master_port, timeout_s);
  c10::intrusive_ptr<c10d::Store> store;
  opened.address = own_address_towards(host, spec.master_port);
  if (hosts_store) {
    Descriptor socket = inherited_or_own(spec, host);
    const std::string address = listening_address(socket.get());
    const WithoutNameServer unnamed;
    store = host_store(address, std::move(socket), options);
  } else {
    const std::string address = answering_address(host, spec.master_port, timeout_s);
    const WithoutNameServer unnamed;
    store = c10::make_intrusive<c10d::TCPStore>(address, options);
  }
  return c10::make_intrusive<c10d::PrefixStore>(prefix, std::move(store));
}

/// How many worlds were joined, by place in a job, since ranks may be threads of one process.
struct Joins {
  std::mutex mutex;
  std::map<std::string, int64_t> counts;
};
Joins joins;

std::string place_of(const plan::WorldSpec& spec) {
  return fmt::format("{}:{}/{}/{}/{}", canonical_host(spec.master_addr), spec.master_port, spec.job_key,
                     spec.restart, spec.rank);
}

/// The prefix of the world's keys. Other jobs at the same store, earlier attempts of this job, worlds that
/// its processes have joined before, and processes that do not know the job's key have other prefixes.
std::string store_prefix(const plan::WorldSpec& spec) {
  return fmt::format("trireme/{}/{}/{}", spec.job_key, spec.restart, joins_so_far(spec));
}

std::string claim_key(int64_t rank) {
  return fmt::format("is/{}", rank);
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

/// Where another process serves this job as rank 0, throws what claim_rank() says of two such processes.
void look_for_another_rank_0(const plan::WorldSpec& spec, const std::string& host,
                             const std::string& prefix) {
  constexpr double kLook_s = 1.0;
  const auto open = [spec, host, prefix]() -> c10::intrusive_ptr<c10d::Store> {
    const std::string address = answering_address(host, spec.master_port, kLook_s);
    const WithoutNameServer unnamed;
    return c10::make_intrusive<c10d::PrefixStore>(
        prefix, c10::make_intrusive<c10d::TCPStore>(address, options_for(spec.master_port, kLook_s)));
  };
  try {
    BoundedStore store(open, kLook_s);
    if (wait_for_keys(store, {claim_key(spec.rank)}, kLook_s)) claim_rank(store, spec.rank);
  } catch (const c10::Error&) {
    // What listens there is none of ours.
  }
}

[[noreturn]] void throw_no_store(const plan::WorldSpec& spec, const std::string& host, double waited_s,
                                 const c10::Error& error) {
  throw_if_out_of_descriptors("comm.join");
  throw CommError(
      "[comm.join] rank {} of {} found no store at {}:{} within {:.1f} s ({}); check that rank 0 runs there, "
      "that no firewall blocks the port, and that nothing else listens on it",
      spec.rank, spec.world_size, host, spec.master_port, waited_s, cause_of(error));
}

}  // namespace

int64_t joins_so_far(const plan::WorldSpec& spec) {
  const std::lock_guard lock(joins.mutex);
  const auto found = joins.counts.find(place_of(spec));
  return found == joins.counts.end() ? 0 : found->second;
}

void note_join(const plan::WorldSpec& spec) {
  const std::lock_guard lock(joins.mutex);
  ++joins.counts[place_of(spec)];
}

void claim_rank(BoundedStore& store, int64_t rank) {
  const ProcessId own = own_process();
  const std::string key = claim_key(rank), mine = fmt::format("{} {}", to_text(own), host_name());
  std::string there = store.compareSet(key, "", mine);
  // A process of this host that has died may have been started again.
  if (there != mine && has_died(parse_process(there))) there = store.compareSet(key, there, mine);
  if (there == mine) return;
  throw CommError(
      "[comm.join] two processes joined as rank {}: process {} on host {} and process {} on host {}; give "
      "each its own RANK, and start all ranks again",
      rank, parse_process(there).pid, there.substr(there.rfind(' ') + 1), own.pid, host_name());
}

void follow_host(BoundedStore& store, double longest_s) {
  if (!store.check({claim_key(0)})) return;
  const ProcessId host = parse_process(store.get_to_str(claim_key(0)));
  if (host.host != host_identity()) return;
  store.follow([host] { return processor_seconds(host.pid); }, longest_s);
}

void agree_on_size(c10d::Store& store, const Meeting& meeting) {
  const std::string size = std::to_string(meeting.ranks.size());
  const std::string mine = fmt::format("{} {} {}", size, meeting.rank, host_name());
  const std::string first = store.compareSet("size", "", mine);
  std::istringstream words(first);
  std::string their_size, their_rank, their_host;
  words >> their_size >> their_rank >> their_host;
  if (their_size == size) return;
  const std::string reason = fmt::format(
      "the ranks differ in WORLD_SIZE: rank {} on host {} has {}, rank {} on host {} has {}; give all the "
      "same, and start all ranks again",
      their_rank, their_host, their_size, meeting.rank, host_name(), size);
  end_meeting(store, meeting, reason);
  throw CommError("[{}] {}", meeting.op, reason);
}

Rendezvous open_rendezvous(const plan::WorldSpec& spec, double timeout_s) {
  const std::string host = canonical_host(spec.master_addr);
  const double started = monotonic_seconds();
  Rendezvous result;
  result.hosts_store = spec.rank == 0 && !spec.agent_store;
  result.where = fmt::format("{}:{}", host, spec.master_port);
  // A rank speaks to its store for itself and for its progress board, and the host of the store to all ranks.
  require_descriptors("comm.join", result.hosts_store ? 2 * spec.world_size : 2);
  // Shared with a thread that may outlive this call, stuck in a name server or a silent port.
  const auto opened = std::make_shared<Opened>();
  const std::string prefix = store_prefix(spec);
  const auto open = [spec, host, prefix, hosts = result.hosts_store, timeout_s, opened] {
    return open_store(spec, host, prefix, hosts, timeout_s, *opened);
  };
  try {
    result.store = c10::make_intrusive<BoundedStore>(open, std::max(timeout_s, 1.0) + kConnectSlack_s);
  } catch (const PortInUse&) {
    look_for_another_rank_0(spec, host, prefix);
    throw;
  } catch (const c10::Error& error) {
    throw_no_store(spec, host, monotonic_seconds() - started, error);
  }
  result.address = opened->address;
  return result;
}

}  // namespace trireme::comm
