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
    : Optimizer(config.lr),
      config_(config),
      params_(std::move(params)),
      numbers_(std::ssize(plan::record_of(config.name).state)) {
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
        "[optim] a segment begins at element {} of its range and element {} of its parameter; with "
        "optim.state={} both must be multiples of {}",
        segment.range.begin, segment.first, plan::name(config_.state), kernels::kMomentBlock);
  }
  return segments;
}

void FlatOptimizer::set_segments(size_t index, std::vector<Segment> segments) {
  params_[index].segments = as_updated(std::move(segments));
}

kernels::UpdatePart FlatOptimizer::part_at(const plan::Range& range, const Group& group) const {
  return {.begin = range.begin,
          .end = range.end,
          .lr = static_cast<float>(lr() * group.lr_factor),
          .weight_decay = static_cast<float>(config_.weight_decay * group.decay_factor)};
}

UpdateRange FlatOptimizer::whole_range(size_t index) const {
  const FlatParam& param = params_[index];
  UpdateRange range{
      .master = param.master, .grad = param.grad, .copy = param.copy, .moments = {}, .parts = {}};
  range.moments.numbers.assign(states_[index].begin(), states_[index].begin() + numbers_);
  for (const Segment& segment : param.segments) range.parts.push_back(part_at(segment.range, segment.group));
  return range;
}

UpdateRange FlatOptimizer::range_of(size_t index, const Segment& segment) const {
  const FlatParam& param = params_[index];
  UpdateRange range{.master = part_of(param.master, segment),
                    .grad = part_of(param.grad, segment),
                    .copy = part_of(param.copy, segment),
                    .moments = {.numbers = {},
                                .key = mix64(segment.key, static_cast<uint64_t>(steps_)),
                                .first_block = segment.first / kernels::kMomentBlock},
                    .parts = {part_at({0, segment.range.size()}, segment.group)}};
  for (int64_t number = 0; number < numbers_; ++number)
    range.moments.numbers.push_back(
        states_[index][static_cast<size_t>(number)].part(segment.range.begin, segment.range.end));
  return range;
}

void FlatOptimizer::update(size_t index, const GradScale& grad_scale) {
  const FlatParam& param = params_[index];
  if (param.segments.empty()) return;  // all of it is frozen, and its gradient has no memory
  if (config_.state == plan::OptimState::kFp32) {
    UpdateRange range = whole_range(index);
    update_range(range, grad_scale);
  } else {
    for (const Segment& segment : param.segments) {  // each is rounded by a key of its own
      UpdateRange range = range_of(index, segment);
      update_range(range, grad_scale);
    }
  }
  if (config_.ema == 0.0) return;
  for (const Segment& segment : param.segments) {
    at::Tensor averages = part_of(states_[index].back().values(), segment);
    average(averages, part_of(param.master, segment));
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
  TRIREME_CHECK(config_.ema > 0.0, "[optim] there is no weight average to swap in: optim.ema is 0");
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
