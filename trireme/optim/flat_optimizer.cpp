#include "trireme/optim/flat_optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/plan/optimizer.h"

namespace trireme::optim {

namespace {

using kernels::Moment;
using kernels::MomentFormat;
using kernels::MomentKind;

MomentFormat format_of(plan::OptimState state) {
  switch (state) {
    case plan::OptimState::kFp32:
      return MomentFormat::kFp32;
    case plan::OptimState::kBf16:
      return MomentFormat::kBf16;
    case plan::OptimState::kInt8:
      break;
  }
  return MomentFormat::kInt8;
}

MomentKind kind_of(const plan::OptimizerRecord& record, std::string_view state) {
  return std::ranges::find(record.squares, state) != record.squares.end() ? MomentKind::kSquares
                                                                          : MomentKind::kSigned;
}

}  // namespace

FlatOptimizer::FlatOptimizer(const plan::OptimConfig& config, std::vector<FlatParam> params)
    : Optimizer(config.lr), config_(config), params_(std::move(params)) {
  const plan::OptimizerRecord& record = plan::record_of(config.name);
  for (FlatParam& param : params_) {
    param.segments = as_updated(std::move(param.segments));
    const int64_t numel = param.master.numel();
    std::vector<Moment>& state = states_.emplace_back();
    for (const std::string_view name : record.state)
      state.emplace_back(numel, format_of(config.state), kind_of(record, name), param.master.device());
    if (config.ema == 0.0) continue;
    state.emplace_back(numel, MomentFormat::kFp32, MomentKind::kSigned, param.master.device());
    state.back().write(param.master);  // of what is frozen until later
  }
}

std::vector<Segment> FlatOptimizer::as_updated(std::vector<Segment> segments) const {
  if (config_.state == plan::OptimState::kFp32) return merged(segments);
  for (const Segment& segment : segments) {
    TRIREME_CHECK(
        segment.range.begin % kernels::kMomentBlock == 0 && segment.first % kernels::kMomentBlock == 0,
        "[optim] a segment begins at element {} of a range and {} of its parameter; with optim.state={} both "
        "must be multiples of {}",
        segment.range.begin, segment.first, plan::name(config_.state), kernels::kMomentBlock);
  }
  return segments;
}

void FlatOptimizer::set_segments(size_t index, std::vector<Segment> segments) {
  params_[index].segments = as_updated(std::move(segments));
}

UpdateRange FlatOptimizer::range_of(size_t index, const Segment& segment) const {
  const FlatParam& param = params_[index];
  UpdateRange range{.master = part_of(param.master, segment),
                    .grad = part_of(param.grad, segment),
                    .copy = part_of(param.copy, segment),
                    .moments = {.numbers = {},
                                .key = mix64(segment.key, static_cast<uint64_t>(steps_)),
                                .first_block = segment.first / kernels::kMomentBlock},
                    .lr = lr() * segment.group.lr_factor,
                    .weight_decay = config_.weight_decay * segment.group.decay_factor};
  for (const Moment& number : states_[index])
    range.moments.numbers.push_back(number.part(segment.range.begin, segment.range.end));
  return range;
}

void FlatOptimizer::update(size_t index, const GradScale& grad_scale) {
  for (const Segment& segment : params_[index].segments) {
    UpdateRange range = range_of(index, segment);
    update_range(range, grad_scale);
    if (config_.ema == 0.0) continue;
    at::Tensor averages = range.moments.numbers.back().values();
    average(averages, range.master);
  }
}

/// The first step's parameters begin it. On a CPU products and sums are operators of their own: a fused one
/// would round an element by where it lies.
void FlatOptimizer::average(at::Tensor& average, const at::Tensor& master) const {
  const double weight = 1.0 - config_.ema;
  if (steps_ == 1) {
    average.copy_(master);
  } else if (average.is_cuda()) {
    average.lerp_(master, weight);
  } else {
    average.add_((master - average).mul_(weight));
  }
}

void FlatOptimizer::swap_average(size_t index) {
  TRIREME_CHECK(config_.ema > 0.0, "[optim] no averages are kept: optim.ema is 0");
  if (steps_ == 0) return;  // there are none yet
  const FlatParam& param = params_[index];
  for (const Segment& segment : param.segments) {
    at::Tensor master = part_of(param.master, segment);
    at::Tensor average = part_of(states_[index].back().values(), segment);
    const at::Tensor held = master.clone();
    master.copy_(average);
    average.copy_(held);
    if (at::Tensor copy = part_of(param.copy, segment); copy.defined()) copy.copy_(master);
  }
}

int64_t FlatOptimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const std::vector<Moment>& numbers : states_) {
    for (const Moment& number : numbers) bytes += number.bytes();
  }
  return bytes;
}

std::vector<std::string_view> FlatOptimizer::state_names() const {
  return plan::state_of(config_);
}

at::Tensor FlatOptimizer::state(size_t index, size_t number, const plan::Range& range) const {
  return states_[index][number].part(range.begin, range.end).read();
}

void FlatOptimizer::set_state(size_t index, size_t number, const plan::Range& range,
                              const at::Tensor& values) {
  states_[index][number].part(range.begin, range.end).write(values);
}

}  // namespace trireme::optim
