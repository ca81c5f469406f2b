#pragma once
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <optional>

namespace trireme::train {

/// A moment of a device's own time, so that steps are as long as the device took for them, whenever the host
/// looks: on a GPU when the current stream gets there, on a CPU when this is made.
class Moment {
 public:
  explicit Moment(c10::Device device);
  /// Seconds from `earlier`, on the same device, to this; the host waits for both.
  double seconds_after(const Moment& earlier) const;

 private:
  double host_seconds_;
  std::optional<c10::Event> event_;  ///< none: on a CPU
};

}  // namespace trireme::train
