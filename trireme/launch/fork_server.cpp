#include "trireme/launch/fork_server.h"

#include <fcntl.h>
#include <linux/sched.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::launch {
namespace {

constexpr const char* kVariable = "TRIREME_FORK_SERVER_FD";
constexpr size_t kMostDescriptors = 16;

/// The fixed part of a request, ahead of its text; the descriptors travel with it.
struct Head {
  uint64_t text_bytes = 0;
  uint32_t count = 0;                               ///< of the descriptors
  std::array<int32_t, kMostDescriptors> numbers{};  ///< that they have in the child
};

/// The environment and descriptors that a child is to have.
struct Request {
  Head head;
  std::vector<Descriptor> descriptors;
  std::string environment;  ///< as text_of() writes it
};

bool send_all(int socket, const char* bytes, size_t size) {
  while (size > 0) {
    const ssize_t sent = ::send(socket, bytes, size, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    bytes += sent;
    size -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, char* bytes, size_t size) {
  while (size > 0) {
    const ssize_t got = ::recv(socket, bytes, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    bytes += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

union Control {
  cmsghdr header;
  char space[CMSG_SPACE(sizeof(int) * kMostDescriptors)];
};

bool send_head(int socket, const Head& head, const std::vector<int>& descriptors) {
  Control control{};
  iovec bytes{.iov_base = const_cast<Head*>(&head), .iov_len = sizeof head};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    const size_t size = sizeof(int) * descriptors.size();
    message.msg_control = &control;
    message.msg_controllen = CMSG_SPACE(size);
    cmsghdr* const rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), size);
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof head);
}

bool receive_head(int socket, Request& request) {
  Control control{};
  iovec bytes{.iov_base = &request.head, .iov_len = sizeof request.head};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = &control;
  message.msg_controllen = sizeof control;
  ssize_t got;
  do {
    got = ::recvmsg(socket, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(part) + i * sizeof(int), sizeof descriptor);
      request.descriptors.emplace_back(descriptor);
    }
  }
  return got == static_cast<ssize_t>(sizeof request.head) && (message.msg_flags & MSG_CTRUNC) == 0 &&
         request.descriptors.size() == request.head.count;
}

std::optional<Request> receive_request(int socket) {
  Request request;
  if (!receive_head(socket, request)) return std::nullopt;
  request.environment.resize(request.head.text_bytes);
  if (!receive_all(socket, request.environment.data(), request.environment.size())) return std::nullopt;
  return request;
}

bool has_threads() {
  std::error_code error;
  const std::filesystem::directory_iterator tasks("/proc/self/task", error);
  return error || std::distance(tasks, std::filesystem::directory_iterator()) != 1;
}

/// As fork(), but the new process is a child of the caller's parent. fork() also tells the C library of its
/// new thread id and the kernel of its robust mutexes; that is done here. Returns -1 with errno.
pid_t fork_sibling() {
  int* thread_id = nullptr;
  void* robust_list = nullptr;
  size_t robust_size = 0;
  if (has_threads()) {
    errno = EBUSY;
    return -1;
  }
  if (::prctl(PR_GET_TID_ADDRESS, &thread_id) != 0) return -1;
  ::syscall(SYS_get_robust_list, 0, &robust_list, &robust_size);
  // Not clone3(), which containers refuse. It ends with the server's own SIGCHLD.
  constexpr unsigned long kFlags = CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID;
  // Architectures differ in which of the last two is the child's thread id; the other one is not read.
  const auto pid = static_cast<pid_t>(::syscall(SYS_clone, kFlags, nullptr, nullptr, thread_id, thread_id));
  if (pid == 0) ::syscall(SYS_set_robust_list, robust_list, robust_size);
  return pid;
}

/// Gives the request's descriptors their numbers. They move out of each other's way first.
void place_descriptors(Request& request) {
  const auto* const first = request.head.numbers.begin();
  const auto* const last = first + request.head.count;
  const int beyond = first == last ? 0 : *std::max_element(first, last) + 1;
  for (Descriptor& descriptor : request.descriptors)
    descriptor = Descriptor(::fcntl(descriptor.get(), F_DUPFD_CLOEXEC, beyond));
  for (size_t i = 0; i < request.descriptors.size(); ++i)
    ::dup2(request.descriptors[i].get(), request.head.numbers[i]);
  request.descriptors.clear();
}

/// "NAME=value" and a zero byte for each variable.
std::string text_of(const Environment& environment) {
  std::string text;
  for (const auto& [name, value] : environment.variables())
    text.append(name).append("=").append(value).push_back('\0');
  return text;
}

Environment environment_of(const std::string& text) {
  Environment environment;
  for (size_t at = 0; at < text.size();) {
    const std::string variable = text.c_str() + at;
    const size_t equals = variable.find('=');
    environment.set(variable.substr(0, equals), variable.substr(equals + 1));
    at += variable.size() + 1;
  }
  return environment;
}

/// The rest of what launch::Child does between fork and exec.
void become(Request& request, pid_t launcher) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != launcher) ::_exit(127);  // the launcher died before the line above
  ::setpgid(0, 0);
  place_descriptors(request);
  set_process_environment(environment_of(request.environment));
}

/// Descriptors for a child, and the numbers that they have there.
struct Placed {
  std::vector<int> descriptors;
  Head head;

  void add(int descriptor, int number) {
    if (descriptor < 0) return;
    TRIREME_CHECK(descriptors.size() < kMostDescriptors, "[launch] a rank has at most {} descriptors",
                  kMostDescriptors);
    head.numbers[head.count++] = number;
    descriptors.push_back(descriptor);
  }
};

Placed placed(const ChildSpec& spec) {
  Placed result;
  const auto or_ours = [](int given, int ours) { return given >= 0 ? given : ours; };
  result.add(or_ours(spec.stdin_fd, STDIN_FILENO), STDIN_FILENO);
  result.add(or_ours(spec.stdout_fd, STDOUT_FILENO), STDOUT_FILENO);
  result.add(or_ours(spec.stderr_fd, STDERR_FILENO), STDERR_FILENO);
  for (const int descriptor : spec.keep_fds) result.add(descriptor, descriptor);
  return result;
}

/// Whether an answer has come, or the server has ended, before `interrupt_fd` is readable.
bool answers(int socket, int interrupt_fd) {
  std::array<pollfd, 2> both = {
      {{.fd = socket, .events = POLLIN, .revents = 0}, {.fd = interrupt_fd, .events = POLLIN, .revents = 0}}};
  while (::poll(both.data(), both.size(), -1) < 0 && errno == EINTR) {
  }
  return both[0].revents != 0;
}

/// The child's pid; 0 when there is none.
pid_t ask(int socket, const ChildSpec& spec, int interrupt_fd) {
  Placed child = placed(spec);
  const std::string text = text_of(spec.environment);
  child.head.text_bytes = text.size();
  int32_t pid = 0;
  const bool answered = send_head(socket, child.head, child.descriptors) &&
                        send_all(socket, text.data(), text.size()) && answers(socket, interrupt_fd) &&
                        receive_all(socket, reinterpret_cast<char*>(&pid), sizeof pid);
  if (answered && pid < 0) log_debug("[launch] ranks cannot be forked: {}", errno_text(-pid));
  return answered && pid > 0 ? pid : 0;
}

}  // namespace

ForkServer::ForkServer(ChildSpec program) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) return;
  socket_ = Descriptor(ends[0]);
  const Descriptor theirs(ends[1]);
  program.environment.set(kVariable, std::to_string(theirs.get()));
  program.keep_fds = {theirs.get()};
  try {
    server_.emplace(program);
  } catch (const EnvironmentError& error) {
    log_debug("{}", error.what());
    socket_.close();
  }
}

std::optional<Child> ForkServer::fork(const ChildSpec& spec, int interrupt_fd) {
  if (!socket_) return std::nullopt;
  const pid_t pid = ask(socket_.get(), spec, interrupt_fd);
  if (pid == 0) {
    socket_.close();
    server_.reset();  // also ends one that would answer after all
    return std::nullopt;
  }
  ::setpgid(pid, pid);  // the child does so, too; whoever comes first
  return Child(pid);
}

void serve_forks() {
  const std::optional<int64_t> number = Environment::process().get_int(kVariable);
  if (!number) return;
  Descriptor socket(static_cast<int>(*number));
  ::fcntl(socket.get(), F_SETFD, FD_CLOEXEC);
  const pid_t launcher = ::getppid();
  while (std::optional<Request> request = receive_request(socket.get())) {
    int32_t pid = fork_sibling();
    if (pid == 0) {
      socket.close();
      become(*request, launcher);
      return;
    }
    if (pid < 0) pid = -errno;
    if (!send_all(socket.get(), reinterpret_cast<const char*>(&pid), sizeof pid)) break;
  }
  ::_exit(0);
}

}  // namespace trireme::launch
