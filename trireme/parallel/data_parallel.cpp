#include "trireme/parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/agree.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/range.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/agreement.h"
#include "trireme/parallel/recording.h"

namespace trireme::parallel {
size_t DataParallel::index_of(const std::string& unit) const {
  const auto found = index_.find(unit);
  TRIREME_CHECK(found != index_.end(),
                "[parallel.data_parallel] the model ran unit '{}', which was not declared", unit);
  return found->second;
}

std::pair<size_t, size_t> DataParallel::place_of(const std::string& parameter) const {
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const auto& params = units_[unit]->params();
    const auto found = std::ranges::find(params, parameter, &std::pair<std::string, at::Tensor>::first);
    if (found != params.end()) return {unit, static_cast<size_t>(found - params.begin())};
  }
  throw LogicError("[parallel.data_parallel] there is no parameter {}; use a name from units()", parameter);
}

std::optional<size_t> DataParallel::unit_of_frozen(const std::string& parameter) const {
  const auto found = std::ranges::find_if(
      units_, [&](const auto& unit) { return unit->frozen_entry(parameter) != nullptr; });
  if (found == units_.end()) return std::nullopt;
  return static_cast<size_t>(found - units_.begin());
}

void DataParallel::begin_forward() {
  check_usable();
  notice_update();
  take_writes();
  current_.clear();
  executor_.begin_forward(programs_.forward(trains()), trains());
  if (use_from_ != UseFrom::kOperators) return;
  executor_.enter_forward(0);  // modules that read memory past the dispatcher announce nothing
  current_ = {0};
}

at::Tensor DataParallel::run_unit(const std::string& name, const at::Tensor& x,
                                  const std::function<at::Tensor(const at::Tensor&)>& forward,
                                  bool begins_pass) {
  if (begins_pass) begin_forward();
  if (use_from_ == UseFrom::kBuckets) return forward(x);
  const size_t unit = index_of(name);
  if (is_root(unit)) {
    const at::Tensor output = forward(x);
    executor_.leave_forward(unit);
    return output;
  }
  executor_.enter_forward(unit);
  const at::Tensor input = nn::call_after_backward(x, [this, unit] {
    end_backward_range();
    executor_.leave_backward(unit);
  });
  const kernels::TraceRange range("forward " + name);
  const at::Tensor output = forward(input);
  if (at::GradMode::is_enabled()) {
    nn::call_before_backward(output, [this, unit] {
      begin_backward_range(unit);
      executor_.enter_backward(unit);
    });
  }
  executor_.leave_forward(unit);
  return output;
}

/// Not a kernels::TraceRange: traces want ranges that nest in autograd's own, and this one spans many of
/// those.
void DataParallel::begin_backward_range(size_t unit) {
  end_backward_range();
  kernels::push_range(("backward " + units_[unit]->name()).c_str());
  in_backward_range_ = true;
}

void DataParallel::end_backward_range() {
  if (in_backward_range_) kernels::pop_range();
  in_backward_range_ = false;
}

/// A token below the number of units is a unit whose parameters are used; a larger one, less that number, is
/// a unit whose pieces are used.
void DataParallel::touched(const std::vector<size_t>& tokens, nn::Nesting nesting) {
  std::vector<size_t> units;
  for (const size_t token : tokens) {
    if (token < units_.size()) {
      units.push_back(token);
      continue;
    }
    const size_t unit = token - units_.size();
    TRIREME_CHECK(unit < units_.size(),
                  "[parallel.data_parallel] an operator used what is marked {}, beyond the marks of {} units",
                  token, units_.size());
    units_[unit]->take_writes();  // an optimizer goes on from what others have written
  }
  if (units.empty()) return;
  if (!in_backward_ && (complete_ || current_.empty())) notice_update();
  if (use_from_ == UseFrom::kOperators) use_units(units, nesting);
}

void DataParallel::written(size_t token, int64_t offset) {
  if (token < units_.size()) return units_[token]->note_write(offset);
  pieces_written_ = true;
}

/// What runs inside of an operator that uses several units names one of them at a time: it leaves none.
void DataParallel::use_units(const std::vector<size_t>& units, nn::Nesting nesting) {
  if (in_backward_) {
    for (const size_t unit : units) executor_.enter_backward(unit);
    return;
  }
  const auto is_in = [](const std::vector<size_t>& some, size_t unit) {
    return std::ranges::find(some, unit) != some.end();
  };
  if (current_.empty() || (trains() && !executor_.trains())) {
    executor_.begin_forward(programs_.forward(trains()), trains());
    current_.clear();
  } else if (nesting == nn::Nesting::kOuter) {
    for (const size_t unit : std::exchange(current_, {})) {
      if (!is_in(units, unit)) executor_.leave_forward(unit);
    }
  }
  for (const size_t unit : units) {
    executor_.enter_forward(unit);
    if (!is_in(current_, unit)) current_.push_back(unit);
  }
}

void DataParallel::gradient_complete(size_t unit, size_t param) {
  if (!in_backward_) {
    abandon_step();  // what others have added to gradients must not count
    throw LogicError(
        "[parallel.backward] parameter {} was differentiated outside the engine; call engine.backward(loss), "
        "not loss.backward(). If it was another engine's backward(), as a generator's that goes through a "
        "discriminator, set requires_grad to false on this engine's parameters until that pass is over",
        units_[unit]->params()[param].first);
  }
  if (!completion_.trainable()[unit][param]) return;  // frozen since its forward pass
  c10::OptionalStreamGuard guard;
  go_back_to_stream(guard);
  nn::follow_gradient_writers(units_[unit]->params()[param].second);
  units_[unit]->take_gradient(param);
  if (!completion_.take(unit, param)) return;
  executor_.complete(unit);
  // Operators announce no end: whatever needs the parameters later gathers them again.
  if (use_from_ == UseFrom::kOperators) executor_.leave_backward(unit);
}

/// Autograd runs what belongs to a parameter on the stream that was current when it was first seen. The
/// engine works on that of its caller, so that memory is given back and taken again in the order of one
/// stream.
void DataParallel::go_back_to_stream(c10::OptionalStreamGuard& guard) const {
  if (!stream_) return;
  const c10::Stream here = c10::impl::VirtualGuardImpl(stream_->device_type()).getStream(stream_->device());
  if (here == *stream_) return;
  c10::Event done(stream_->device_type());
  done.record(here);
  done.block(*stream_);
  guard.reset_stream(*stream_);
}

/// Before the micro-batch begins, so that a refused one changes nothing.
void DataParallel::check_output(const at::Tensor& output, bool is_loss) const {
  check_not_evaluating("backward");
  const char* const what = is_loss ? "loss" : "output";
  const int64_t rank = mesh_.world->rank();
  if (!output.defined())
    throw LogicError(
        "[parallel.backward] rank {}: the {} is an undefined tensor; pass what the module has computed", rank,
        what);
  if (!output.requires_grad())
    throw LogicError(
        "[parallel.backward] rank {}: the {} does not require a gradient, as when it was computed under "
        "NoGradGuard, was detached, or depends on no parameter that requires one; compute it with gradients",
        rank, what);
  if (is_loss && output.numel() != 1)
    throw LogicError(
        "[parallel.backward] rank {}: the loss is no scalar but has the shape ({}); reduce it to one number "
        "with mean() or sum()",
        rank, fmt::join(output.sizes(), ", "));
}

/// Ranks along tp compute one loss. In a model of ours each differentiates it; in a module of a user
/// (tensor_layers.h) gradients are shares, of which the first rank's is all of the loss.
double DataParallel::loss_share() const {
  return options_.users_module && mesh_.tp->rank() > 0 ? 0.0 : 1.0;
}

/// Once, since the host waits: a program that gives ranks along tp other data does so from the start.
void DataParallel::check_alike_along_tp(const at::Tensor& loss) {
  if (!options_.users_module || mesh_.tp->size() == 1 || loss_compared_) return;
  check_same_loss(loss, mesh_);
  loss_compared_ = true;
}

void DataParallel::backward(const at::Tensor& loss, double weight) {
  check_output(loss, /*is_loss=*/true);
  check_alike_along_tp(loss);
  const double scale = begin_micro_batch(weight, loss.scalar_type()) * loss_share();
  differentiate(loss, at::full_like(loss.detach(), scale), /*last=*/true);
}

void DataParallel::accumulate(const at::Tensor& loss, double weight) {
  check_output(loss, /*is_loss=*/true);
  check_alike_along_tp(loss);
  const double scale = begin_micro_batch(weight, loss.scalar_type()) * loss_share();
  differentiate(loss, at::full_like(loss.detach(), scale), /*last=*/false);
}

void DataParallel::backward(const at::Tensor& output, const at::Tensor& grad_output, double weight) {
  check_output(output, /*is_loss=*/false);
  begin_micro_batch(weight);
  differentiate(output, grad_output, /*last=*/true);
}

void DataParallel::accumulate(const at::Tensor& output, const at::Tensor& grad_output, double weight) {
  check_output(output, /*is_loss=*/false);
  begin_micro_batch(weight);
  differentiate(output, grad_output, /*last=*/false);
}

/// Returns the factor for the loss of the micro-batch.
double DataParallel::begin_micro_batch(double weight, at::ScalarType loss) {
  check_usable();
  check_not_evaluating("backward");
  mean_.check(weight, loss);
  notice_update();
  take_writes();
  if (complete_) {
    throw LogicError(
        "[parallel.backward] rank {}: the gradient of the previous step was never used: build torch "
        "optimizers over engine->optimizer_tensors(), not over the module's parameters, whose grad() is "
        "undefined; or call engine->step(optimizer), engine->skip_step() to drop the gradient, or "
        "engine->accumulate(loss) for every micro-batch but the last",
        mesh_.world->rank());
  }
  follow_freezing();
  completion_.begin();
  current_.clear();
  return mean_.add(weight, loss);
}

/// Where ranks that froze different parameters gather in different orders, their collectives differ before
/// they can compare what is frozen. So these say what this rank has changed.
void DataParallel::follow_freezing() {
  const Completion::Flags before = completion_.trainable();
  if (!completion_.follow_freezing()) return;
  programs_.follow_freezing();
  if (setting().gathers()) shared_.remark = frozen_alike_.change(before, completion_.trainable());
}

/// A hook carries over to later steps what it has not sent, so it is given means: sums could be scaled
/// differently in each step.
bool DataParallel::averages_before_hook() const {
  const Hook hook = options_.hook.hook;
  return hook != Hook::kNone && hook != Hook::kLocalSgd && options_.reduce_when == ReduceWhen::kOncePerStep;
}

/// All micro-batches of the step have their weights now, and none of its gradients has been reduced.
void DataParallel::begin_sums(bool last_micro_batch) {
  if (!last_micro_batch || !averages_before_hook()) return;
  settle_mean();
  shared_.before_hook = mean_.take_before_sum();
}

/// Ranks exchange the weights of their micro-batches, and with them what each has frozen.
void DataParallel::settle_mean() {
  const Completion::Flags& trainable = completion_.trainable();
  const at::Tensor notes =
      mean_.settle(mean_.exchanges() ? frozen_alike_.note_on_device(trainable) : at::Tensor());
  if (notes.defined()) frozen_alike_.compare(notes, trainable);
}

/// Runs a backward pass, or what replaces one: when it throws, for whatever reason, the step is forgotten.
template <typename Body>
void DataParallel::in_backward(const Body& body) {
  try {
    in_backward_ = true;
    if (!options_.device.is_cpu())
      stream_ = c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device);
    body();
    in_backward_ = false;
  } catch (...) {
    abandon_step();
    throw;
  }
}

void DataParallel::differentiate(const at::Tensor& output, const at::Tensor& grad_output, bool last) {
  in_backward([&] {
    begin_sums(last);
    const Turn turn = programs_.backward(last);
    executor_.begin_backward(turn, last);
    output.backward(grad_output);
    end_backward_range();
    if (last && options_.unused == Unused::kError) completion_.check_all_used(mesh_.world->rank());
    executor_.end_backward();
    programs_.follow(executor_.seen(), turn.pass->kind);
    if (last) finish_step();
  });
}

void DataParallel::accumulate_deferred(const std::function<void()>& compute) {
  begin_micro_batch(0.0);
  const at::NoGradGuard no_grad;
  in_backward([&] {
    executor_.begin_backward(programs_.backward_weight(), /*last=*/false);
    for (const auto& unit : units_) unit->prepare_gradients();
    compute();
    for (const auto& unit : units_) {
      size_t param = 0;
      for (const auto& [name, leaf] : unit->params()) {
        nn::follow_gradient_writers(leaf);
        unit->take_gradient(param++);
      }
    }
    executor_.end_backward();
  });
}

void DataParallel::reduce_accumulated() {
  begin_micro_batch(0.0);
  const at::NoGradGuard no_grad;
  in_backward([&] {
    if (options_.unused == Unused::kError) completion_.check_all_used(mesh_.world->rank());
    begin_sums(/*last=*/true);
    executor_.begin_backward(programs_.reduce(), /*last=*/true);
    executor_.end_backward();
    complete_gradient();
  });
}

at::Tensor DataParallel::accumulated_gradient(const std::string& parameter) {
  const auto [unit, index] = place_of(parameter);
  return units_[unit]->accumulated_gradient(index);
}

/// The end of a step's last backward pass.
void DataParallel::finish_step() {
  if (!order_agreed_) agree_on_order();
  complete_gradient();
}

/// After an exception some parameters have gradients and some units are being reduced: all of that is
/// dropped.
void DataParallel::abandon_step() noexcept {
  try {
    // Streams that autograd did not join may still write to gradients.
    if (!options_.device.is_cpu() && !is_recording(options_.device)) kernels::synchronize_gpu();
    skip_step();
  } catch (const std::exception& error) {
    broken_ = error.what();
  }
}

void DataParallel::check_usable() const {
  if (broken_.empty()) return;
  throw LogicError(
      "[parallel.data_parallel] rank {}: a step failed and could not be undone ({}); restart from saved "
      "weights",
      mesh_.world->rank(), broken_);
}

/// Ranks may complete units in different orders, but must reduce them in one: rank 0's, seen once.
void DataParallel::agree_on_order() {
  order_agreed_ = true;
  if (mesh_.dp->size() == 1) return;
  at::Tensor shared = at::tensor(executor_.completions(), at::kLong).to(options_.device);
  mesh_.dp->broadcast(shared, 0);
  const at::Tensor host = shared.cpu();
  const auto* const first = host.const_data_ptr<int64_t>();
  programs_.set_reductions({first, first + host.numel()});
}

void DataParallel::shadow_micro_batch(bool last_micro_batch) {
  follow_freezing();
  TRIREME_CHECK(order_agreed_ && programs_.recorded(),
                "[parallel.shadow_micro_batch] rank {} has not run a step whose collectives it could repeat, "
                "or not since parameters were frozen or unfrozen; give every rank at least one batch",
                mesh_.world->rank());
  begin_micro_batch(0.0);
  const at::NoGradGuard no_grad;
  in_backward([&] {
    begin_sums(last_micro_batch);
    const Turn forward = programs_.forward(/*trains=*/true);
    executor_.replay(forward, programs_.backward(last_micro_batch), last_micro_batch);
    if (last_micro_batch) complete_gradient();
  });
}

bool DataParallel::any_rank(bool mine) const {
  return comm::any_rank(*mesh_.dp, mine);
}

}  // namespace trireme::parallel
