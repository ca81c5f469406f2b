#include "trireme/parallel/side_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "trireme/base/clock.h"
#include "trireme/parallel/recording.h"

namespace trireme::parallel {
namespace {

c10::Event timed_event(c10::Device device) {
  return c10::Event(device.type(), c10::EventFlag::BACKEND_DEFAULT);
}

double total_ms(std::vector<std::pair<c10::Event, c10::Event>>& spans) {
  double sum = 0.0;
  for (auto& [begin, end] : spans) {
    end.synchronize();
    sum += begin.elapsedTime(end);
  }
  spans.clear();
  return sum;
}

}  // namespace

SideStream::SideStream(c10::Device device, bool beside) : device_(device) {
  if (!beside || device.is_cpu()) return;
  stream_ =
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Stream SideStream::current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

SideStream::Event SideStream::run_here(const std::function<void()>& work) {
  if (!measures_) {
    work();
    return {};
  }
  if (device_.is_cpu()) {
    const double begin = monotonic_seconds();
    work();
    const double ms = 1e3 * (monotonic_seconds() - begin);
    host_times_ += {ms, ms};
    return {};
  }
  Span span{timed_event(device_), timed_event(device_)};
  span.first.record(current());
  work();
  span.second.record(current());
  exposed_.push_back(std::move(span));
  return {};
}

SideStream::Event SideStream::run(const std::function<void()>& work, const Event& after, const Event& again) {
  return run_and_move(work, after, again, /*beside=*/false);
}

SideStream::Event SideStream::run_beside(const std::function<void()>& work, const Event& after,
                                         const Event& again) {
  return run_and_move(work, after, again, /*beside=*/true);
}

SideStream::Event SideStream::run_and_move(const std::function<void()>& work, const Event& after, Event event,
                                           bool beside) {
  if (!stream_) {
    follow(after, device_);
    return run_here(work);
  }
  if (!beside) {
    c10::Event ready(device_.type());
    ready.record(current());
    ready.block(*stream_);
  }
  const c10::StreamGuard guard(*stream_);
  follow(after, device_);
  std::optional<c10::Event> begin;
  if (measures_) begin.emplace(timed_event(device_)).record(*stream_);
  work();
  if (!event.event_) event.event_ = std::make_shared<c10::Event>(device_.type());
  event.event_->record(*stream_);
  if (begin) {
    c10::Event end = timed_event(device_);
    end.record(*stream_);
    busy_.emplace_back(std::move(*begin), std::move(end));
  }
  return event;
}

SideStream::Event SideStream::run_untimed(const std::function<void()>& work, const Event& again) {
  const bool measures = measures_;
  measures_ = false;
  Event event = run_and_move(work, {}, again, /*beside=*/false);
  measures_ = measures;
  return event;
}

void SideStream::follow(const Event& event, c10::Device device) {
  if (!event.event_) return;
  if (is_recording(device)) return wait_for_outside(event.event_->eventId());
  event.event_->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void SideStream::mark(Event& event, c10::Device device) {
  if (device.is_cpu()) return;
  if (is_recording(device)) return mark_for_outside(event.event_->eventId());
  if (!event.event_) event.event_ = std::make_shared<c10::Event>(device.type());
  event.event_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void SideStream::wait(const Event& event) {
  if (!event.event_) return;
  const c10::Stream stream = current();
  if (!measures_) return event.event_->block(stream);
  Span span{timed_event(device_), timed_event(device_)};
  span.first.record(stream);
  event.event_->block(stream);
  span.second.record(stream);
  exposed_.push_back(std::move(span));
}

CommTimes SideStream::take_times() {
  CommTimes times = host_times_;
  host_times_ = {};
  const double exposed = total_ms(exposed_);
  // Without a stream of its own, computation waited for all of the work.
  times += {stream_ ? total_ms(busy_) : exposed, exposed};
  return times;
}

}  // namespace trireme::parallel
