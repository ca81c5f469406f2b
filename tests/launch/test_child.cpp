// A rank for the launcher's tests. Each argument is a step, taken in order; "2:step" is for rank 2 only and
// "!2:step" for the others. It ends with code 0 after the last step.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "trireme/base/flight_record.h"
#include "trireme/base/heartbeat.h"
#include "trireme/launch/fork_server.h"

namespace {

int exit_code_on_signal = 0;

/// The process that has loaded the program: this one, unless it is a fork of that.
const pid_t loaded_by = ::getpid();

void put(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(fd, bytes.data(), bytes.size());
    if (count <= 0) std::_Exit(90);
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

std::string variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? "(unset)" : value;
}

void sleep_seconds(const std::string& text) {
  std::this_thread::sleep_for(std::chrono::duration<double>(std::stod(text)));
}

int signal_of(const std::string& name) {
  const std::pair<const char*, int> names[] = {
      {"INT", SIGINT}, {"TERM", SIGTERM}, {"USR1", SIGUSR1}, {"HUP", SIGHUP}};
  for (const auto& [known, number] : names) {
    if (name == known) return number;
  }
  throw std::runtime_error("no signal " + name);
}

/// "INT 130": exit with 130 on SIGINT. "TERM ignore": as if nothing had been sent. "USR1 say": print a line.
void trap(const std::string& text) {
  const size_t blank = text.find(' ');
  const int number = signal_of(text.substr(0, blank));
  const std::string action = text.substr(blank + 1);
  if (action == "ignore") {
    std::signal(number, SIG_IGN);
    return;
  }
  if (action == "say") {
    std::signal(number,
                [](int) { [[maybe_unused]] const ssize_t out = ::write(STDOUT_FILENO, "heard\n", 6); });
    return;
  }
  exit_code_on_signal = std::stoi(action);
  std::signal(number, [](int) { std::_Exit(exit_code_on_signal); });
}

/// Writes our process id to the file; "%r" in its path stands for the rank.
void write_file(const std::string& path_pattern) {
  std::string path = path_pattern;
  if (const size_t at = path.find("%r"); at != std::string::npos) path.replace(at, 2, variable("RANK"));
  std::ofstream(path + ".tmp") << ::getpid();
  std::rename((path + ".tmp").c_str(), path.c_str());
}

/// Waits until every rank has written its file.
void await_files(const std::string& path_pattern) {
  for (int rank = 0; rank < std::stoi(variable("WORLD_SIZE")); ++rank) {
    std::string path = path_pattern;
    path.replace(path.find("%r"), 2, std::to_string(rank));
    while (::access(path.c_str(), F_OK) != 0) sleep_seconds("0.001");
  }
}

/// Takes one connection from the inherited socket and prints its bytes and the address that is listened on.
void serve() {
  const int fd = std::stoi(variable("TRIREME_LISTEN_FD"));
  sockaddr_in address{};
  socklen_t size = sizeof address;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size);
  char text[INET_ADDRSTRLEN];
  ::inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
  put(STDOUT_FILENO,
      std::string("listening on ") + text + ":" + std::to_string(ntohs(address.sin_port)) + "\n");
  const int connection = ::accept(fd, nullptr, nullptr);
  char buffer[256];
  const ssize_t count = ::read(connection, buffer, sizeof buffer);
  put(STDOUT_FILENO, std::string_view(buffer, count > 0 ? static_cast<size_t>(count) : 0));
}

void dial(const std::string& text) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  ::inet_pton(AF_INET, variable("MASTER_ADDR").c_str(), &address.sin_addr);
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(variable("MASTER_PORT"))));
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) std::_Exit(91);
  put(fd, text + "\n");
}

/// Prints the open descriptors above 2.
void list_fds(const std::string&) {
  std::string open = "open:";
  for (int fd = 3; fd < 256; ++fd) {
    if (::fcntl(fd, F_GETFD) >= 0) open.append(" ").append(std::to_string(fd));
  }
  put(STDOUT_FILENO, open + "\n");
}

/// A helper process that outlives this one unless somebody stops it; its id goes to the file.
void spawn_helper(const std::string& path) {
  if (::fork() != 0) return;
  write_file(path);
  for (;;) ::pause();
}

/// A process that the end of this one does not end: it writes to stderr until nobody can read it any more,
/// and then its id to the file.
void leave_daemon(const std::string& path) {
  if (::fork() != 0) return;
  ::setsid();
  std::signal(SIGPIPE, SIG_IGN);
  while (::write(STDERR_FILENO, ".", 1) == 1) sleep_seconds("0.01");
  write_file(path);
  std::_Exit(0);
}

void flood(const std::string& bytes) {
  const std::string line(99, 'x');
  for (long left = std::stol(bytes); left > 0; left -= 100) put(STDERR_FILENO, line + "\n");
}

/// Prints the width of the terminal whose descriptor the variable holds.
void print_columns(const std::string& name) {
  winsize size{};
  const std::string fd = variable(name);
  const bool known = fd != "(unset)" && ::ioctl(std::stoi(fd), TIOCGWINSZ, &size) == 0;
  put(STDOUT_FILENO, name + ": " + (known ? std::to_string(size.ws_col) : "none") + "\n");
}

/// "PATH TEXT": the text becomes the file.
void write_text(const std::string& value) {
  const size_t blank = value.find(' ');
  std::ofstream(value.substr(0, blank)) << value.substr(blank + 1) << "\n";
}

/// Sanitizers answer some signals with a report and an exit code of their own.
void end_by(int signal) {
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

/// Gives signs of life, fifty in a second, for so many seconds.
void give_signs_of_life(const std::string& seconds) {
  auto record =
      trireme::FlightRecord::open(std::stoi(variable("TRIREME_FLIGHT_FD")), std::stoi(variable("RANK")));
  trireme::count_beats_in(record.beats());
  for (double left = std::stod(seconds); left > 0.0; left -= 0.02) {
    trireme::beat();
    sleep_seconds("0.02");
  }
}

/// Computes for so many seconds.
void spin(const std::string& seconds) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto end = now() + std::chrono::duration<double>(std::stod(seconds));
  while (now() < end) {
  }
}

/// A thread waits on a lock that this one holds, ends, and is joined.
void join_thread() {
  std::mutex lock;
  int seen = 0;
  lock.lock();
  std::thread thread([&] {
    const std::lock_guard held(lock);
    seen = ::getpid();
  });
  lock.unlock();
  thread.join();
  put(STDOUT_FILENO, seen == ::gettid() ? "threads work\n" : "the first thread has another id\n");
}

void take_step(const std::string& name, const std::string& value) {
  if (name == "exit") std::_Exit(std::stoi(value));
  if (name == "kill") end_by(std::stoi(value));
  if (name == "beat") give_signs_of_life(value);
  if (name == "spin") spin(value);
  if (name == "stop") ::raise(SIGSTOP);
  if (name == "sleep") sleep_seconds(value);
  if (name == "out") put(STDOUT_FILENO, value + "\n");
  if (name == "err") put(STDERR_FILENO, value + "\n");
  if (name == "raw-out") put(STDOUT_FILENO, value);
  if (name == "raw-err") put(STDERR_FILENO, value);
  if (name == "env") put(STDOUT_FILENO, value + "=" + variable(value) + "\n");
  if (name == "columns") print_columns(value);
  if (name == "write") write_text(value);
  if (name == "trap") trap(value);
  if (name == "pid-file") write_file(value);
  if (name == "await-files") await_files(value);
  if (name == "serve") serve();
  if (name == "dial") dial(value);
  if (name == "fds") list_fds(value);
  if (name == "stdin") put(STDOUT_FILENO, std::getchar() == EOF ? "stdin is empty\n" : "stdin has bytes\n");
  if (name == "own-group")
    put(STDOUT_FILENO, ::getpgrp() == ::getpid() ? "leads its group\n" : "is in a group\n");
  if (name == "helper") spawn_helper(value);
  if (name == "loaded-by") put(STDOUT_FILENO, std::to_string(loaded_by) + "\n");
  if (name == "parent") put(STDOUT_FILENO, std::to_string(::getppid()) + "\n");
  if (name == "thread") join_thread();
  if (name == "flood") flood(value);
  if (name == "daemon") leave_daemon(value);
  if (name == "close") ::close(std::stoi(value));
}

bool is_for_me(std::string& step) {
  const size_t colon = step.find(':');
  const size_t equals = step.find('=');
  if (colon == std::string::npos || colon > equals) return true;
  std::string who = step.substr(0, colon);
  step.erase(0, colon + 1);
  const bool negated = who.starts_with('!');
  if (negated) who.erase(0, 1);
  return (who == variable("RANK")) != negated;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && argv[1] == std::string_view("thread-first")) {
    std::thread([] { ::pause(); }).detach();
  }
  trireme::launch::serve_forks();
  for (int i = 1; i < argc; ++i) {
    std::string step = argv[i];
    if (!is_for_me(step)) continue;
    const size_t equals = step.find('=');
    take_step(step.substr(0, equals), equals == std::string::npos ? "" : step.substr(equals + 1));
  }
  return 0;
}
