#pragma once
// Communication beside computation: a stream of its own on a GPU. On a CPU, or when overlap is switched off,
// work runs where it is called and there is nothing to wait for.
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace trireme::parallel {

/// How long communication took, and how much of it computation had to wait for.
struct CommTimes {
  double busy_ms = 0.0;
  double exposed_ms = 0.0;
  CommTimes& operator+=(const CommTimes& other) {
    busy_ms += other.busy_ms;
    exposed_ms += other.exposed_ms;
    return *this;
  }
  /// The share of communication that ran behind computation; 0 when there was none.
  double hidden_share() const { return busy_ms > 0.0 ? 1.0 - exposed_ms / busy_ms : 0.0; }
};

class SideStream {
 public:
  /// The end of a piece of work. A default one has nothing to wait for.
  class Event {
   public:
    Event() = default;

   private:
    friend class SideStream;
    std::shared_ptr<c10::Event> event_;
  };

  /// `beside`: work gets a stream of its own where the device has streams.
  SideStream(c10::Device device, bool beside);

  /// Runs `work` after everything that the current stream holds now, and after the event `after`, be it of
  /// another stream. Memory that it allocates belongs to this stream; memory that it uses must stay until
  /// somebody has waited for the event. The result is `again`, an event of earlier work, moved to the end of
  /// this one, as recordings that wait for it need; a new event when `again` is a default one.
  Event run(const std::function<void()>& work, const Event& after = {}, const Event& again = {});
  /// The same after the event alone, beside what the current stream holds.
  Event run_beside(const std::function<void()>& work, const Event& after, const Event& again = {});
  /// run() for work that is no communication: it is not timed.
  Event run_untimed(const std::function<void()>& work, const Event& again = {});
  /// The current stream goes on after the event, which counts as time that computation has lost. While the
  /// stream records (recording.h), the event was made inside of the recording.
  void wait(const Event& event);
  /// The same for a stream that loses nothing by it. While it records, the event was made outside: each
  /// launch waits for where the event is then.
  static void follow(const Event& event, c10::Device device);
  /// Moves `event` to the end of what the current stream holds, and makes one of a default one. While it
  /// records, each launch does so, of an event that was made outside.
  static void mark(Event& event, c10::Device device);

  /// From now on work and waits are timed, at the cost of two events each.
  void measure(bool on) { measures_ = on; }
  /// What was measured since the last call. The host waits for the device.
  CommTimes take_times();

 private:
  using Span = std::pair<c10::Event, c10::Event>;
  c10::Stream current() const;
  Event run_here(const std::function<void()>& work);
  Event run_and_move(const std::function<void()>& work, const Event& after, Event event, bool beside);

  c10::Device device_;
  std::optional<c10::Stream> stream_;  ///< none: work runs on the current one
  bool measures_ = false;
  std::vector<Span> busy_, exposed_;
  CommTimes host_times_;  ///< on a CPU
};

}  // namespace trireme::parallel
