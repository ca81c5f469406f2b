#include "trireme/parallel/pipeline_recorder.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <exception>
#include <functional>

#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/host.h"
#include "trireme/comm/group.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/parallel/pipeline.h"
#include "trireme/parallel/stage_links.h"

namespace trireme::parallel {
namespace {

using plan::Action;
using plan::ActionKind;
using plan::StageEvent;

bool somebody_listens_to_allocators() {
  return c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
}

/// 0: nobody knows.
double host_number() {
  const std::string id = boot_id();
  return id.empty() ? 0.0 : static_cast<double>(std::hash<std::string>()(id) >> 12);
}

constexpr size_t kNumbers = 7;  // of an event

std::vector<double> to_numbers(const std::vector<StageEvent>& events, size_t count) {
  std::vector<double> numbers;
  for (const StageEvent& event : events) {
    numbers.insert(numbers.end(), {static_cast<double>(event.kind), static_cast<double>(event.stage),
                                   static_cast<double>(event.micro_batch), static_cast<double>(event.message),
                                   event.begin, event.end, event.bytes});
  }
  numbers.resize(count * kNumbers);
  return numbers;
}

StageEvent from_numbers(const double* numbers) {
  const auto whole = [&](size_t i) { return static_cast<int64_t>(numbers[i]); };
  return {.kind = static_cast<ActionKind>(whole(0)),
          .stage = whole(1),
          .micro_batch = whole(2),
          .message = static_cast<plan::Message>(whole(3)),
          .begin = numbers[4],
          .end = numbers[5],
          .bytes = numbers[6]};
}

}  // namespace

PipelineRecorder::PipelineRecorder(c10::Device device) : device_(device) {}
PipelineRecorder::~PipelineRecorder() = default;

PipelineRecorder::Step::Step(PipelineRecorder* recorder) : recorder_(recorder) {
  if (recorder_ == nullptr) return;
  recorder_->events_.clear();
  recorder_->host_moments_.clear();
  recorder_->marked_ = 0;
  recorder_->has_step_ = true;
  if (!somebody_listens_to_allocators()) recorder_->watch_ = std::make_unique<kernels::AllocationWatch>();
}

PipelineRecorder::Step::~Step() {
  if (recorder_ != nullptr) recorder_->watch_.reset();
}

PipelineRecorder::Span::Span(PipelineRecorder* recorder, const Action& action)
    : recorder_(action.kind == ActionKind::kPost ? nullptr : recorder) {
  if (recorder_ == nullptr) return;
  event_.kind = action.kind;
  event_.stage = action.stage;
  event_.micro_batch = action.micro_batch;
  event_.message = action.message;
  begin();
}

PipelineRecorder::Span::Span(PipelineRecorder* recorder, ActionKind kind) : recorder_(recorder) {
  if (recorder_ == nullptr) return;
  event_.kind = kind;
  begin();
}

void PipelineRecorder::Span::begin() {
  exceptions_ = std::uncaught_exceptions();
  held_before_ = recorder_->held();
  recorder_->counted_bytes_ = 0.0;
  recorder_->mark();
}

PipelineRecorder::Span::~Span() {
  if (recorder_ == nullptr || std::uncaught_exceptions() > exceptions_) return;
  try {
    recorder_->mark();
  } catch (const std::exception&) {
    return;  // the device has failed, and the next call that uses it throws
  }
  const bool grows = event_.is_pass() && event_.kind != ActionKind::kBackwardInput;
  event_.bytes = grows ? recorder_->held() - held_before_ : recorder_->counted_bytes_;
  recorder_->events_.push_back(event_);
}

double PipelineRecorder::held() const {
  return watch_ ? static_cast<double>(watch_->held()) : 0.0;
}

void PipelineRecorder::mark() {
  if (device_.is_cpu()) {
    host_moments_.push_back(monotonic_seconds());
    return;
  }
  if (marked_ == gpu_moments_.size())
    gpu_moments_.emplace_back(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  gpu_moments_[marked_++].record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

/// A GPU's moments are found by how long they came before an event that the host sees pass.
std::vector<double> PipelineRecorder::moments() {
  if (device_.is_cpu()) return host_moments_;
  if (marked_ == 0) return {};
  gpu_moments_[marked_ - 1].synchronize();
  c10::Event now(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  now.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  now.synchronize();
  const double host = monotonic_seconds();
  std::vector<double> moments;
  for (size_t i = 0; i < marked_; ++i) moments.push_back(host - 1e-3 * gpu_moments_[i].elapsedTime(now));
  return moments;
}

std::vector<StageEvent> PipelineRecorder::events() {
  const std::vector<double> at = moments();
  std::vector<StageEvent> events = events_;
  for (size_t i = 0; i < events.size(); ++i) {
    events[i].begin = at[2 * i];
    events[i].end = at[2 * i + 1];
  }
  return events;
}

std::vector<plan::ClockOffset> align_clocks(comm::Group& group) {
  constexpr int kMeetings = 16;
  const auto hosts = comm::gather_scalars(group, {host_number()});
  std::vector<double> mine;
  for (int i = 0; i < kMeetings; ++i) {
    mine.push_back(monotonic_seconds());
    comm::gather_scalars(group, {0.0});
    mine.push_back(monotonic_seconds());
  }
  std::vector<std::vector<plan::Meeting>> seen;
  for (const std::vector<double>& rank : comm::gather_scalars(group, mine)) {
    std::vector<plan::Meeting>& meetings = seen.emplace_back();
    for (size_t i = 0; i < rank.size(); i += 2) meetings.push_back({rank[i], rank[i + 1]});
  }
  std::vector<plan::ClockOffset> offsets = plan::clock_offsets(seen);
  for (size_t rank = 0; rank < offsets.size(); ++rank) {
    if (hosts[rank][0] == hosts[0][0] && hosts[0][0] != 0.0) offsets[rank] = {};
  }
  return offsets;
}

plan::StageEvents gather_events(comm::Group& group, std::vector<StageEvent> mine,
                                const std::vector<plan::ClockOffset>& offsets) {
  size_t most = 0;
  const auto counts = comm::gather_scalars(group, {static_cast<double>(mine.size())});
  for (const auto& count : counts) most = std::max(most, static_cast<size_t>(count[0]));
  const auto rows = comm::gather_scalars(group, to_numbers(mine, most));
  plan::StageEvents events(rows.size());
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    for (size_t i = 0; i < static_cast<size_t>(counts[rank][0]); ++i) {
      StageEvent event = from_numbers(rows[rank].data() + i * kNumbers);
      event.begin += offsets[rank].seconds;
      event.end += offsets[rank].seconds;
      events[rank].push_back(event);
    }
  }
  return events;
}

void Pipeline::record(bool on) {
  if (on && !recorder_) recorder_ = std::make_unique<PipelineRecorder>(mesh_.world->device());
  if (!on) recorder_.reset();
}

plan::PipelineReport Pipeline::report() {
  return report(schedule_);
}

plan::PipelineReport Pipeline::report(const plan::Schedule& simulated) {
  check_usable();
  TRIREME_CHECK(recorder_ && recorder_->has_step(),
                "[parallel.pipeline] rank {} has recorded no step; call record(true) before it",
                mesh_.world->rank());
  links_->flush();
  const auto sent = static_cast<double>(links_->sent_bytes() - sent_before_step_ - sent_beside_);
  const auto offsets = align_clocks(*mesh_.pp);
  plan::PipelineReport report =
      plan::report_step(schedule_, gather_events(*mesh_.pp, recorder_->events(), offsets), simulated);
  for (const plan::ClockOffset& offset : offsets)
    report.clock_error_s = std::max(report.clock_error_s, offset.error);
  const auto counted = comm::gather_scalars(*mesh_.pp, {sent});
  for (size_t rank = 0; rank < counted.size(); ++rank)
    report.measured.ranks[rank].sent_bytes = counted[rank][0];
  return report;
}

}  // namespace trireme::parallel
