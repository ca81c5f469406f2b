#include "trireme/controller/greeting.h"

#include <unistd.h>

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

}  // namespace trireme::controller
