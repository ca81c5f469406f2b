#include "trireme/train/passes.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "trireme/base/clock.h"
#include "trireme/base/heartbeat.h"
#include "trireme/base/log.h"
#include "trireme/kernels/allocation_watch.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/range.h"
#include "trireme/plan/cuda_graphs.h"
#include "trireme/train/batch_documents.h"

namespace trireme::train {
namespace {

/// Without the stack that torch adds.
std::string text_of(const std::exception& error) {
  const auto* const from_torch = dynamic_cast<const c10::Error*>(&error);
  const std::string text = from_torch != nullptr ? from_torch->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace

Passes::Passes(nn::Model& model, parallel::DataParallel& engine, c10::Device device, Options options)
    : model_(model), engine_(engine), device_(device), options_(std::move(options)), copies_(device) {
  if (options_.make_recording && !engine_.can_be_recorded()) {
    give_up("the engine communicates within a pass, or moves memory that the pass reads");
  }
}

int64_t Passes::recorded() const {
  return std::ranges::count_if(kinds_, [](const Recorded& kind) { return kind.recording != nullptr; });
}

bool Passes::measures_lag() const {
  return options_.make_recording && options_.when == When::kDeviceIdles && steps_ > 1 &&
         steps_ <= plan::kStepsBeforeRecording;
}

/// The host began to enqueue this step's passes at `began` and has just enqueued the last. The time that a
/// wait takes when the device is done already does not count.
void Passes::measure_lag(double began) {
  const double enqueued = monotonic_seconds();
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const auto wait = [&] {
    c10::Event reached(device_.type());
    reached.record(stream);
    reached.synchronize();
    return monotonic_seconds();
  };
  const double done = wait(), done_again = wait();
  lags_.push_back(std::max(0.0, (done - enqueued) - (done_again - done)) / (enqueued - began));
  log_debug("graphs  step {}: the host took {:.2f} ms, the device {:.2f} ms longer, a wait {:.3f} ms", steps_,
            1e3 * (enqueued - began), 1e3 * (done - enqueued), 1e3 * (done_again - done));
}

/// Ranks decide together: all of them keep units in place from then on, and the slowest host holds up all.
void Passes::decide() {
  if (options_.when == When::kDeviceIdles) {
    const bool waits = engine_.any_rank(plan::device_waits_for_host(lags_));
    const bool lacks_memory =
        engine_.any_rank(!plan::may_stay(engine_.bytes_to_stay(), kernels::gpu_memory_free()));
    if (!waits || lacks_memory) {
      options_.make_recording = {};
      return;
    }
  }
  engine_.stay_in_place();
}

at::Tensor Passes::run(const std::function<data::Batch()>& next, double scale) {
  ++steps_;
  if (options_.make_recording && steps_ == plan::kStepsBeforeRecording + 1) decide();
  const double began = monotonic_seconds();
  at::Tensor loss_sum = at::zeros({}, at::TensorOptions().device(device_).dtype(at::kDouble));
  int64_t passes = options_.accumulation;
  for (int64_t index = 0; index < passes; ++index) {
    beat();
    const data::Batch batch = copies_.ahead(next());
    if (batch.step_passes > 0) passes = batch.step_passes;
    const Kind kind = index + 1 == passes ? kLast : index == 0 ? kFirst : kMiddle;
    const at::Tensor loss = pass(batch, scale * batch.share(), kind);
    if (batch.share() > 0.0) loss_sum.add_(loss, batch.share());  // a mean over no targets is NaN
  }
  if (measures_lag()) measure_lag(began);
  return loss_sum;
}

Passes::Given Passes::on_device(const data::Batch& batch) const {
  return {batch.inputs.to(device_, true), batch.targets.to(device_, true),
          documents_on(device_, batch.documents)};
}

bool Passes::fits_recordings(const data::Batch& batch) const {
  const bool records = options_.make_recording && steps_ > plan::kStepsBeforeRecording;
  return records && batch.rows == options_.rows && batch.step_rows == options_.step_rows;
}

at::Tensor Passes::pass(const data::Batch& batch, double scale, Kind kind) {
  if (!fits_recordings(batch)) return compute(on_device(batch), scale, kind);
  take_in(batch);
  Recorded& recorded = kinds_[kind];
  if (recorded.recording && recorded.scale != scale) give_up("the scale of the loss has changed");
  if (!recorded.recording && !(options_.make_recording && record(scale, kind))) {
    return compute(given_, scale, kind);
  }
  return launch(recorded, kind);
}

at::Tensor Passes::compute(const Given& given, double scale, Kind kind) {
  const at::Tensor loss = loss_of(given, scale);
  kind == kLast ? engine_.backward(loss, scale) : engine_.accumulate(loss, scale);
  return loss.detach();
}

/// A batch of which nothing counts takes part all the same, and its loss wants a scale to divide by.
at::Tensor Passes::loss_of(const Given& given, double scale) {
  const nn::LossTarget target{given.targets, options_.loss_chunk_bytes, scale == 0.0 ? 1.0 : scale,
                              given.documents};
  if (!measures_) return model_.loss(given.inputs, target);
  const kernels::AllocationWatch watch;
  at::Tensor loss = model_.loss(given.inputs, target);
  activation_bytes_ = std::max(activation_bytes_, watch.held());
  return loss;
}

/// Copies the batch to where recordings read it.
void Passes::take_in(const data::Batch& batch) {
  const auto take = [this](at::Tensor& here, const at::Tensor& from) {
    if (!from.defined()) return;
    if (!here.defined())
      here = at::empty_strided(from.sizes(), from.strides(),
                               at::TensorOptions().device(device_).dtype(from.dtype()));
    here.copy_(from, /*non_blocking=*/true);
  };
  take(given_.inputs, batch.inputs);
  take(given_.targets, batch.targets);
}

/// Records the pass; returns whether that was possible. No kernel has run in either case, and the engine is
/// as it was before.
bool Passes::record(double scale, Kind kind) {
  const parallel::DataParallel::Progress before = engine_.progress();
  Recorded& recorded = kinds_[kind];
  try {
    recorded.recording = options_.make_recording();
    recorded.recording->record([this, scale, kind] { kinds_[kind].loss = compute(given_, scale, kind); });
    recorded.scale = scale;
    recorded.after = engine_.progress();
    recorded.reductions = recorded.after.reductions - before.reductions;
    engine_.set_progress(before);
    return true;
  } catch (const std::exception& error) {
    give_up(text_of(error));
    engine_.set_progress(before);
    return false;
  }
}

at::Tensor Passes::launch(Recorded& recorded, Kind kind) {
  const kernels::TraceRange range("recorded pass");
  recorded.recording->launch();
  recorded.after.reductions = engine_.reductions() + recorded.reductions;
  engine_.set_progress(recorded.after);
  if (kind == kLast) engine_.reduce_launched();
  return recorded.loss;
}

void Passes::give_up(const std::string& reason) {
  log_warning("train.cuda_graphs: passes cannot be recorded ({}); training continues without", reason);
  options_.make_recording = {};
  // Launched passes may still use the memory of their recordings.
  if (device_.is_cuda()) kernels::synchronize_gpu();
  kinds_ = {};
}

}  // namespace trireme::train
