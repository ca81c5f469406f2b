#include "tests/comm/processes.h"

#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"

namespace trireme::test {
namespace {

[[noreturn]] void run_child(int64_t rank, const std::function<int(int64_t)>& body) {
  at::set_num_threads(1);  // the thread pool does not survive a fork
  int code = 100;
  try {
    code = body(rank);
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
  }
  ::_exit(code);
}

int to_code(int status) {
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int wait_until(pid_t pid, double deadline) {
  int status = 0;
  while (::waitpid(pid, &status, WNOHANG) == 0) {
    if (monotonic_seconds() > deadline) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return to_code(status);
}

void collect_listeners(const std::string& path, int64_t port, std::vector<std::string>& found) {
  std::ifstream file(path);
  std::string line;
  const std::string wanted = fmt::format(":{:04X}", port);
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    std::string slot, local, remote, state;
    fields >> slot >> local >> remote >> state;
    const auto colon = local.rfind(':');
    if (state == "0A" && colon != std::string::npos && local.substr(colon) == wanted) {
      found.push_back(local.substr(0, colon));
    }
  }
}

}  // namespace

std::vector<int> fork_ranks(int64_t ranks, const std::function<int(int64_t rank)>& body, double limit_s) {
  std::vector<pid_t> children;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const pid_t pid = ::fork();
    if (pid == 0) run_child(rank, body);
    children.push_back(pid);
  }
  const double deadline = monotonic_seconds() + limit_s;
  std::vector<int> codes;
  for (const pid_t pid : children) codes.push_back(wait_until(pid, deadline));
  return codes;
}

Gate::Gate() : event_(::eventfd(0, EFD_CLOEXEC)) {
  if (!event_) throw std::runtime_error("no eventfd");
}

void Gate::open() const {
  ::eventfd_write(event_.get(), 1);
}

/// The event is not read, so that it is there for all.
bool Gate::wait(double limit_s) const {
  pollfd event{.fd = event_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&event, 1, static_cast<int>(limit_s * 1000)) == 1;
}

namespace {

/// Counts the seconds in which this process could run: of a time in which it was suspended, or waited for a
/// processor, one tick.
class RunningClock {
 public:
  double seconds() const { return ticks_ * kTick_s; }

 private:
  static constexpr double kTick_s = 0.05;

  std::atomic<int64_t> ticks_ = 0;
  std::jthread counter_{[this](const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::duration<double>(kTick_s));
      ++ticks_;
    }
  }};
};

}  // namespace

int expect_comm_error(const std::function<void()>& call, const std::vector<std::string>& words,
                      double limit_s) {
  const RunningClock clock;
  try {
    call();
  } catch (const CommError& error) {
    for (const auto& word : words) {
      if (std::string(error.what()).find(word) != std::string::npos) continue;
      fmt::print(stderr, "no '{}' in: {}\n", word, error.what());
      return 1;
    }
    const double took = clock.seconds();
    if (took > limit_s)
      fmt::print(stderr, "took {:.1f} s, allowed are {:.1f} s: {}\n", took, limit_s, error.what());
    return took > limit_s ? 2 : 0;
  }
  return 3;
}

Listener listen_on_loopback() {
  Listener listener{.fd = ::socket(AF_INET, SOCK_STREAM, 0)};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  EXPECT_EQ(::bind(listener.fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(::listen(listener.fd, 16), 0);
  EXPECT_EQ(::getsockname(listener.fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  listener.port = ntohs(address.sin_port);
  return listener;
}

int64_t free_port() {
  const Listener listener = listen_on_loopback();
  ::close(listener.fd);
  return listener.port;
}

std::vector<std::string> listening_addresses(int64_t port) {
  std::vector<std::string> found;
  collect_listeners("/proc/net/tcp", port, found);
  collect_listeners("/proc/net/tcp6", port, found);
  return found;
}

TwoHosts::TwoHosts() {
  const std::string a = name(0), b = name(1);
  made_ = ip(fmt::format("netns add {}", a)) && ip(fmt::format("netns add {}", b)) &&
          ip(fmt::format("link add {0} netns {0} type veth peer name {1} netns {1}", a, b));
  for (int64_t host : {0, 1}) {
    const std::string at = name(host);
    made_ = made_ && ip(fmt::format("-n {0} addr add {1}/24 dev {0}", at, address(host))) &&
            ip(fmt::format("-n {0} link set {0} up", at)) && ip(fmt::format("-n {} link set lo up", at));
  }
}

TwoHosts::~TwoHosts() {
  for (int64_t host : {0, 1}) ip(fmt::format("netns del {}", name(host)));
}

void TwoHosts::enter(int64_t host) const {
  const int space = ::open(fmt::format("/var/run/netns/{}", name(host)).c_str(), O_RDONLY | O_CLOEXEC);
  if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) throw std::runtime_error("cannot enter " + name(host));
  ::close(space);
}

void TwoHosts::part() const {
  if (!ip(fmt::format("-n {0} link set {0} down", name(0)))) throw std::runtime_error("the link stays up");
}

std::string TwoHosts::address(int64_t host) {
  return fmt::format("10.99.0.{}", host + 1);
}

/// Of the namespace and of its interface, which has at most 15 characters.
std::string TwoHosts::name(int64_t host) const {
  return fmt::format("trireme{}{}", host == 0 ? "a" : "b", owner_ % 1'000'000);
}

bool TwoHosts::ip(const std::string& words) {
  return std::system(("ip " + words + " 2> /dev/null").c_str()) == 0;
}

}  // namespace trireme::test
