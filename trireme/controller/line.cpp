#include "trireme/controller/line.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/launch/poll_set.h"
#include "trireme/launch/running_time.h"

namespace trireme::controller {
namespace {

constexpr double kLineLookEvery_s = 0.5;

}  // namespace

Line::Line(Connection connection, double silence_s, std::function<void(const Frame&)> take,
           std::function<void(const std::string&)> lost)
    : connection_(std::move(connection)),
      silence_s_(silence_s),
      take_(std::move(take)),
      lost_(std::move(lost)),
      woken_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      thread_([this] { receive(); }) {}

void Line::wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(woken_.get(), &one, sizeof one);
}

void Line::send_body(uint16_t type, std::string_view body) {
  const std::lock_guard lock(sending_);
  connection_.send(type, body);
  if (connection_.queued() > 0) wake();
}

void Line::receive() {
  try {
    read();
  } catch (const std::exception& error) {
    connection_.shut_down();  // the other side need not wait for this one
    lost_(error.what());
  }
}

void Line::read() {
  launch::RunningTime time;
  double heard = time.seconds();
  for (bool open = true;;) {
    // Frames may have been read with the greeting already.
    while (const auto frame = connection_.next()) {
      heard = time.seconds();
      is<Ping>(*frame) ? send(Pong{.number = message_of<Ping>(*frame).number}) : take_(*frame);
    }
    if (!open) throw CommError("[controller.line] {} has gone: the connection closed", connection_.peer());
    const double silent_s = time.seconds() - heard;
    if (silent_s > silence_s_) {
      throw CommError(
          "[controller.line] {} gave no sign of life for {:.0f} s: it is stopped, or its machine hangs",
          connection_.peer(), silent_s);
    }
    short events = 0;
    bool readable = false;
    {
      const std::lock_guard lock(sending_);
      if (closing_) return;
      connection_.pump();
      events = connection_.events();
    }
    launch::PollSet poll;
    poll.watch(connection_.fd(), events, [&] { readable = true; });
    poll.watch(woken_.get(), POLLIN, [&] {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = ::read(woken_.get(), &count, sizeof count);
    });
    time.wait_for(kLineLookEvery_s);
    poll.wait(kLineLookEvery_s);
    if (readable) open = connection_.read_some();
  }
}

void Line::close() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(sending_);
    closing_ = true;
    try {
      connection_.flush(after_seconds(1.0));
    } catch (const CommError&) {
      // The other side has gone, or will see the end of the connection.
    }
  }
  wake();
  thread_.join();
  connection_.shut_down();
}

}  // namespace trireme::controller
