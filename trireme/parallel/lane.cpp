#include "trireme/parallel/lane.h"

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

Lane::Lane(c10::Device device, bool beside) : device_(device) {
  if (!beside || device.is_cpu()) return;
  stream_ =
      c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

c10::Stream Lane::current() const {
  return c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
}

Lane::Mark Lane::run_here(const std::function<void()>& work) {
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

Lane::Mark Lane::run(const std::function<void()>& work, const Mark& after) {
  return run_and_move(work, after, {});
}

Lane::Mark Lane::run_and_move(const std::function<void()>& work, const Mark& after, Mark mark) {
  if (!stream_) {
    follow(after, device_);
    return run_here(work);
  }
  c10::Event ready(device_.type());
  ready.record(current());
  ready.block(*stream_);
  const c10::StreamGuard guard(*stream_);
  follow(after, device_);
  std::optional<c10::Event> begin;
  if (measures_) begin.emplace(timed_event(device_)).record(*stream_);
  work();
  if (!mark.event_) mark.event_ = std::make_shared<c10::Event>(device_.type());
  mark.event_->record(*stream_);
  if (begin) {
    c10::Event end = timed_event(device_);
    end.record(*stream_);
    busy_.emplace_back(std::move(*begin), std::move(end));
  }
  return mark;
}

Lane::Mark Lane::run_untimed(const std::function<void()>& work, const Mark& again) {
  const bool measures = measures_;
  measures_ = false;
  Mark mark = run_and_move(work, {}, again);
  measures_ = measures;
  return mark;
}

void Lane::follow(const Mark& mark, c10::Device device) {
  if (!mark.event_) return;
  if (is_recording(device)) return wait_for_outside(mark.event_->eventId());
  mark.event_->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

void Lane::wait(const Mark& mark) {
  if (!mark.event_) return;
  const c10::Stream stream = current();
  if (!measures_) return mark.event_->block(stream);
  Span span{timed_event(device_), timed_event(device_)};
  span.first.record(stream);
  mark.event_->block(stream);
  span.second.record(stream);
  exposed_.push_back(std::move(span));
}

LaneTimes Lane::take_times() {
  LaneTimes times = host_times_;
  host_times_ = {};
  const double exposed = total_ms(exposed_);
  // Without a stream of its own all of the work was waited for.
  times += {stream_ ? total_ms(busy_) : exposed, exposed};
  return times;
}

}  // namespace trireme::parallel
