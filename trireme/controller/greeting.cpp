#include "trireme/controller/greeting.h"

#include <unistd.h>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"

namespace trireme::controller {

std::string this_host() {
  char name[kMostName] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

Frame next_of_greeting(Connection& connection, Connection::Clock::time_point deadline) {
  while (true) {
    Frame frame = connection.receive(deadline);
    if (is<Reject>(frame)) throw CommError("{}", message_of<Reject>(frame).reason);
    if (is<Failed>(frame)) throw CommError("{}", message_of<Failed>(frame).text);
    if (is<Bye>(frame))
      throw CommError("[controller.connect] {}: {}", connection.peer(), message_of<Bye>(frame).reason);
    if (!is<Ping>(frame)) return frame;
    send(connection, Pong{.number = message_of<Ping>(frame).number});
  }
}

Status ask_status(const Address& address, const Environment& environment, double timeout_s) {
  const auto deadline = after_seconds(timeout_s);
  Connection connection = connect_to(address, environment, "a server", deadline);
  Hello hello{.role = Role::kObserver, .version = kVersion, .build = build_id(), .pid = ::getpid()};
  hello.host = this_host();
  send(connection, hello);
  message_of<Welcome>(next_of_greeting(connection, deadline));
  send(connection, StatusRequest{});
  auto status = message_of<Status>(next_of_greeting(connection, deadline));
  send(connection, Bye{.reason = "seen"});
  return status;
}

}  // namespace trireme::controller
