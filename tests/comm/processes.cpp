#include "tests/comm/processes.h"

#include <ATen/Parallel.h>
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <sstream>
#include <thread>

#include "trireme/base/clock.h"

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

}  // namespace trireme::test
