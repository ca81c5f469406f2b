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
struct LaneTimes {
  double busy_ms = 0.0;
  double exposed_ms = 0.0;
  LaneTimes& operator+=(const LaneTimes& other) {
    busy_ms += other.busy_ms;
    exposed_ms += other.exposed_ms;
    return *this;
  }
  /// The share of communication that ran behind computation; 0 when there was none.
  double hidden_share() const { return busy_ms > 0.0 ? 1.0 - exposed_ms / busy_ms : 0.0; }
};

class Lane {
 public:
  /// The end of a piece of work. A default one has nothing to wait for.
  class Mark {
   public:
    Mark() = default;

   private:
    friend class Lane;
    std::shared_ptr<c10::Event> event_;
  };

  /// `beside`: work gets a stream of its own where the device has streams.
  Lane(c10::Device device, bool beside);

  /// Runs `work` after everything that the current stream holds now, and after the mark `after`, be it of
  /// another lane. Memory that it allocates belongs to the lane's stream; memory that it uses must stay until
  /// somebody has waited for the mark.
  Mark run(const std::function<void()>& work, const Mark& after = {});
  /// The same for work that is no communication: it is not timed. The result is `again`, a mark of earlier
  /// work, moved to the end of this one; a new mark when `again` is a default one.
  Mark run_untimed(const std::function<void()>& work, const Mark& again = {});
  /// The current stream goes on after the mark, which counts as time that computation has lost. While the
  /// stream records (recording.h), the mark was made inside of the recording.
  void wait(const Mark& mark);
  /// The same for a stream that loses nothing by it. While it records, the mark was made outside: each launch
  /// waits for where the mark is then.
  static void follow(const Mark& mark, c10::Device device);

  /// From now on work and waits are timed, at the cost of two events each.
  void measure(bool on) { measures_ = on; }
  /// What was measured since the last call. The host waits for the device.
  LaneTimes take_times();

 private:
  using Span = std::pair<c10::Event, c10::Event>;
  c10::Stream current() const;
  Mark run_here(const std::function<void()>& work);
  Mark run_and_move(const std::function<void()>& work, const Mark& after, Mark mark);

  c10::Device device_;
  std::optional<c10::Stream> stream_;  ///< none: work runs on the current one
  bool measures_ = false;
  std::vector<Span> busy_, exposed_;
  LaneTimes host_times_;  ///< on a CPU
};

}  // namespace trireme::parallel
