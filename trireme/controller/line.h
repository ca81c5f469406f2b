#pragma once
// A process's connection to the dispatcher: a thread receives and answers pings, any thread may send.
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "trireme/controller/messages.h"

namespace trireme::controller {

class Line {
 public:
  /// `take` is called by the receiving thread for each frame but pings, `lost` once, when the connection
  /// ends, nothing has been heard for `silence_s`, or `take` throws: then the connection is closed.
  Line(Connection connection, double silence_s, std::function<void(const Frame&)> take,
       std::function<void(const std::string&)> lost);
  Line(const Line&) = delete;
  Line& operator=(const Line&) = delete;
  ~Line() { close(); }

  /// Queues the message; the receiving thread writes what the socket does not take now. Throws CommError when
  /// too much is queued.
  template <typename Message>
  void send(const Message& message) {
    send_body(static_cast<uint16_t>(Message::kType), body_of(message));
  }
  void send_body(uint16_t type, std::string_view body);

  /// Writes what is queued, for at most a second, and ends the thread.
  void close();

 private:
  void receive();
  void read();
  void wake();

  Connection connection_;
  double silence_s_;
  std::function<void(const Frame&)> take_;
  std::function<void(const std::string&)> lost_;
  Descriptor woken_;
  std::mutex sending_;
  bool closing_ = false;  ///< under sending_
  std::thread thread_;
};

}  // namespace trireme::controller
