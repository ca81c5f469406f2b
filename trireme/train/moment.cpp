#include "trireme/train/moment.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "trireme/base/clock.h"

namespace trireme::train {

Moment::Moment(c10::Device device) : host_seconds_(monotonic_seconds()) {
  if (device.is_cpu()) return;
  event_.emplace(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // with timing
  event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

double Moment::seconds_after(const Moment& earlier) const {
  if (!event_) return host_seconds_ - earlier.host_seconds_;
  event_->synchronize();
  return 1e-3 * earlier.event_->elapsedTime(*event_);
}

}  // namespace trireme::train
