#include "trireme/parallel/data_parallel.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/kernels/device.h"
#include "trireme/kernels/range.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/recording.h"

namespace trireme::parallel {
namespace {

/// Reductions under way at once: more would only hold more whole gradients.
constexpr size_t kReductionsInFlight = 2;
constexpr size_t kNamesInErrors = 8;

}  // namespace

size_t DataParallel::index_of(const std::string& unit) const {
  const auto found = index_.find(unit);
  TRIREME_CHECK(found != index_.end(),
                "[parallel.data_parallel] the model ran a unit '{}' that was not declared", unit);
  return found->second;
}

/// Every collective of a pass, and every use of memory that ranks share, begins here, so that a rank without
/// data can do the same in the same order.
void DataParallel::act(Action action, size_t unit) {
  if (evaluation_ != nullptr) {
    const bool gathers = action == Action::kUnshard;
    evaluation_->before(encode({action, unit}), units_[unit]->is_whole() != gathers);
  } else if (records()) {
    tape_.push_back({action, unit});
  }
  perform(action, unit);
}

void DataParallel::perform(Action action, size_t unit) {
  switch (action) {
    case Action::kUnshard: {
      const kernels::TraceRange range("gather " + units_[unit]->name());
      return units_[unit]->start_unshard();
    }
    case Action::kReshardAfterForward:
      return units_[unit]->reshard_after_forward();
    case Action::kReshard:
      return units_[unit]->reshard();
    case Action::kPrepareGradients:
      return units_[unit]->prepare_gradients();
    case Action::kReduce:
      incomplete_[unit] = 0;
      completed_.push_back(unit);
      return launch_ready();
  }
}

/// Whether the gradients of this micro-batch are reduced, or added to those of the next.
bool DataParallel::reduces() const {
  return last_micro_batch_ || options_.reduce_when == ReduceWhen::kEveryMicroBatch;
}

/// Validation has no backward pass, so a rank without data has nothing of it to repeat.
bool DataParallel::records() const {
  return in_backward_ || (at::GradMode::is_enabled() && evaluation_ == nullptr);
}

void DataParallel::begin_forward() {
  check_usable();
  notice_update();
  take_writes();
  current_.reset();
  if (evaluation_ == nullptr) {  // it may come between the forward and the backward pass of a step
    visits_.clear();
    tape_.clear();
  }
  if (use_from_ == UseFrom::kBuckets) {
    for (const auto& unit : units_) unit->unshard();
  } else {
    enter_forward(0);
  }
}

void DataParallel::enter_forward(size_t unit) {
  act(Action::kUnshard, unit);
  units_[unit]->unshard();
  if (records() && std::ranges::find(visits_, unit) == visits_.end()) visits_.push_back(unit);
  if (!beside_) return;
  const auto place = std::ranges::find(forward_order_, unit);
  const auto rest = std::distance(place, forward_order_.end());
  for (int64_t ahead = 1; ahead <= options_.prefetch && ahead < rest; ++ahead)
    act(Action::kUnshard, place[ahead]);
}

void DataParallel::leave_forward(size_t unit) {
  if (is_root(unit) || held_ > 0) return;
  const bool begins_backward = use_from_ == UseFrom::kRunUnit && unit + 1 == units_.size();
  if (begins_backward && at::GradMode::is_enabled()) return;
  act(at::GradMode::is_enabled() ? Action::kReshardAfterForward : Action::kReshard, unit);
}

void DataParallel::enter_backward(size_t unit) {
  act(Action::kUnshard, unit);
  units_[unit]->unshard();
  if (!beside_) return;
  const auto place = std::ranges::find(forward_order_, unit);
  if (place == forward_order_.end()) return;
  const auto before = std::distance(forward_order_.begin(), place);
  for (int64_t ahead = 1; ahead <= options_.prefetch && ahead <= before; ++ahead) {
    act(Action::kUnshard, *(place - ahead));
  }
}

at::Tensor DataParallel::run_unit(const std::string& name, const at::Tensor& x,
                                  const std::function<at::Tensor(const at::Tensor&)>& forward) {
  if (use_from_ == UseFrom::kBuckets) return forward(x);
  const size_t unit = index_of(name);
  enter_forward(unit);
  const at::Tensor input = nn::call_after_backward(x, [this, unit] {
    end_backward_range();
    act(Action::kReshard, unit);
  });
  const kernels::TraceRange range("forward " + name);
  const at::Tensor output = forward(input);
  if (at::GradMode::is_enabled()) {
    nn::call_before_backward(output, [this, unit] {
      begin_backward_range(unit);
      enter_backward(unit);
      act(Action::kPrepareGradients, unit);
    });
  }
  leave_forward(unit);
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

/// Tokens are units whose parameters are used, and behind them units whose pieces are.
void DataParallel::touched(const std::vector<size_t>& tokens) {
  std::vector<size_t> units;
  for (const size_t token : tokens) {
    if (token < units_.size()) {
      units.push_back(token);
    } else {
      units_[token - units_.size()]->take_writes();  // an optimizer goes on from what others have written
    }
  }
  if (units.empty()) return;
  if (!in_backward_ && (complete_ || !current_)) notice_update();
  if (use_from_ == UseFrom::kOperators) use_units(units);
}

void DataParallel::written(size_t token, int64_t offset) {
  if (token < units_.size()) return units_[token]->note_write(offset);
  pieces_written_ = true;
}

void DataParallel::use_units(const std::vector<size_t>& units) {
  for (const size_t unit : units) {
    if (in_backward_) {
      enter_backward(unit);
      continue;
    }
    enter_forward(unit);
    if (current_ && std::ranges::find(units, *current_) == units.end()) leave_forward(*current_);
    current_ = unit;
  }
}

void DataParallel::gradient_complete(size_t unit, size_t param) {
  if (!in_backward_) {
    abandon_step();  // what others have added to gradients must not count
    throw LogicError(
        "[parallel.backward] parameter {} was differentiated outside the engine; call engine.backward(loss), "
        "not loss.backward()",
        units_[unit]->params()[param].first);
  }
  c10::OptionalStreamGuard guard;
  go_back_to_stream(guard);
  nn::follow_gradient_writers(units_[unit]->params()[param].second);
  units_[unit]->take_gradient(param);
  used_[unit][param] = true;
  if (--incomplete_[unit] == 0) act(Action::kReduce, unit);
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

void DataParallel::launch_ready() {
  while (launched_ < reduce_order_.size()) {
    const size_t next = reduce_order_[launched_];
    if (incomplete_[next] > 0 || std::ranges::find(completed_, next) == completed_.end()) return;
    ++launched_;
    launch(next);
  }
}

void DataParallel::launch(size_t unit) {
  if (!units_[unit]->trainable()) return;
  const kernels::TraceRange range("reduce " + units_[unit]->name());
  if (reduces()) {
    ++reductions_;
    units_[unit]->prepare_gradients();  // what took no part has gradients of zero
  }
  units_[unit]->start_reduce(last_micro_batch_);
  if (use_from_ == UseFrom::kOperators && !is_root(unit)) units_[unit]->reshard();
  in_flight_.push_back(unit);
  finish_reductions(beside_ ? kReductionsInFlight : 0);
}

/// The current stream waits for the reductions in flight, but for the last `left`.
void DataParallel::finish_reductions(size_t left) {
  while (in_flight_.size() > left) {
    units_[in_flight_.front()]->finish_reduce();
    in_flight_.pop_front();
  }
}

void DataParallel::begin_reductions() {
  complete_ = false;
  launched_ = 0;
  completed_.clear();
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    units_[unit]->begin_backward();
    incomplete_[unit] = static_cast<size_t>(std::ranges::count_if(
        units_[unit]->params(), [](const auto& param) { return param.second.requires_grad(); }));
    if (incomplete_[unit] == 0) completed_.push_back(unit);
  }
}

void DataParallel::end_reductions() {
  while (launched_ < reduce_order_.size()) launch(reduce_order_[launched_++]);
  finish_reductions(0);
  for (size_t unit = 1; unit < units_.size(); ++unit) units_[unit]->reshard();
}

void DataParallel::backward(const at::Tensor& loss, double weight) {
  differentiate(loss, weight, /*last=*/true);
}

void DataParallel::accumulate(const at::Tensor& loss, double weight) {
  differentiate(loss, weight, /*last=*/false);
}

void DataParallel::begin_micro_batch(double weight, bool last) {
  check_usable();
  check_not_evaluating("backward");
  TRIREME_CHECK(weight >= 0.0 && std::isfinite(weight),
                "[parallel.backward] rank {}: a micro-batch has the weight {}; give it a number of rows or "
                "tokens, or leave it out",
                mesh_.world->rank(), weight);
  notice_update();
  take_writes();
  if (complete_) {
    throw LogicError(
        "[parallel.backward] rank {}: nobody has used the gradient of the step before: optimizers of torch "
        "update engine->optimizer_tensors(), not the module's parameters, whose grad() is undefined; or call "
        "engine->step(optimizer), engine->skip_step() to drop it, engine->accumulate(loss) for micro-batches "
        "that are not the last",
        mesh_.world->rank());
  }
  last_micro_batch_ = last;
  weight_sum_ += weight;
  follow_freezing();
}

void DataParallel::differentiate(const at::Tensor& loss, double weight, bool last) {
  begin_micro_batch(weight, last);
  // Ranks divide before they add, so that sums keep the range of one rank's gradient.
  const double scale =
      options_.average == Average::kMean ? weight / static_cast<double>(mesh_.dp->size()) : weight;
  if (!visits_.empty()) forward_order_ = visits_;
  visits_.clear();
  current_.reset();
  begin_reductions();
  // Functions of ours write gradients into memory that is lent before; that of a block when backward reaches
  // it.
  if (use_from_ == UseFrom::kBuckets) {
    for (size_t unit = 0; unit < units_.size(); ++unit) act(Action::kPrepareGradients, unit);
  } else if (use_from_ == UseFrom::kRunUnit) {
    act(Action::kPrepareGradients, 0);
  }
  try {
    in_backward_ = true;
    if (!options_.device.is_cpu())
      stream_ = c10::impl::VirtualGuardImpl(options_.device.type()).getStream(options_.device);
    loss.backward(at::full({}, scale, loss.options()));
    finish_backward();
    in_backward_ = false;
  } catch (...) {
    abandon_step();
    throw;
  }
}

void DataParallel::finish_backward() {
  end_backward_range();
  if (last_micro_batch_) check_all_used();
  end_reductions();
  if (last_micro_batch_) std::swap(tape_, last_tape_);
  tape_.clear();
  if (!last_micro_batch_) return;
  if (!order_agreed_) agree_on_order();
  for (auto& params : used_) std::fill(params.begin(), params.end(), false);
  complete_gradient();
}

/// After an exception some parameters have gradients and some units are being reduced: nothing of it counts.
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
      "[parallel.data_parallel] rank {}: a step failed and could not be forgotten ({}); start again from "
      "saved weights",
      mesh_.world->rank(), broken_);
}

void DataParallel::check_all_used() const {
  if (options_.unused == Unused::kZero) return;
  std::vector<std::string> names;
  for (size_t unit = 0; unit < units_.size(); ++unit) {
    const auto& params = units_[unit]->params();
    for (size_t i = 0; i < params.size(); ++i) {
      if (params[i].second.requires_grad() && !used_[unit][i]) names.push_back(params[i].first);
    }
  }
  if (names.empty()) return;
  const size_t count = names.size();
  if (count > kNamesInErrors) names.resize(kNamesInErrors);
  throw LogicError(
      "[parallel.backward] rank {}: {} parameters took no part in the loss of this step: {}{}; use them, set "
      "requires_grad to false, or allow it with Unused::kZero",
      mesh_.world->rank(), count, join(names, ", "), count > names.size() ? ", ..." : "");
}

/// Ranks may complete units in different orders, but must reduce them in one: rank 0's, seen once.
void DataParallel::agree_on_order() {
  order_agreed_ = true;
  if (mesh_.dp->size() == 1) return;
  std::vector<int64_t> order(completed_.begin(), completed_.end());
  for (const size_t unit : reduce_order_) {
    if (std::ranges::find(completed_, unit) == completed_.end()) order.push_back(static_cast<int64_t>(unit));
  }
  at::Tensor shared = at::tensor(order, at::kLong).to(options_.device);
  mesh_.dp->broadcast(shared, 0);
  const at::Tensor host = shared.cpu();
  const auto* const first = host.const_data_ptr<int64_t>();
  reduce_order_.assign(first, first + host.numel());
}

void DataParallel::shadow_micro_batch(bool last_micro_batch) {
  TRIREME_CHECK(
      !last_tape_.empty(),
      "[parallel.shadow_micro_batch] rank {} has no step yet whose collectives it could repeat; give "
      "every rank at least one batch",
      mesh_.world->rank());
  begin_micro_batch(0.0, last_micro_batch);
  const at::NoGradGuard no_grad;
  try {
    begin_reductions();
    for (const auto& [action, unit] : last_tape_) perform(action, unit);
    end_reductions();
    if (last_micro_batch) complete_gradient();
  } catch (...) {
    abandon_step();
    throw;
  }
}

bool DataParallel::any_rank(bool mine) const {
  for (const auto& rank : comm::gather_scalars(*mesh_.dp, {mine ? 1.0 : 0.0})) {
    if (rank[0] > 0.0) return true;
  }
  return false;
}

}  // namespace trireme::parallel
