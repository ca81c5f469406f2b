// The way of a unit's gradients: memory for them, their sum over the ranks, and when both are given back.
#include <ATen/ATen.h>

#include "trireme/base/error.h"
#include "trireme/kernels/tensor_ops.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/flat_unit.h"
#include "trireme/parallel/gradient_mean.h"
#include "trireme/parallel/recording.h"

namespace trireme::parallel {

void FlatUnit::begin_backward(bool last) {
  adds_up_ = !last;
  if (frozen_) frozen_->check();
  if (gradients_live_) return;
  for (auto& [name, leaf] : params_) leaf.mutable_grad().reset();
}

void FlatUnit::prepare_gradients() {
  if (gradients_live_ || !trainable()) return;
  finish_reduce();
  wait_for_update();  // it may still read the last step's gradients
  SideStream::follow(sum_gathered_, options_.device);
  if (adds_up_ && buffers_.sums_micro_batches_apart) {
    whole_sum_ = at::empty(full_grads_.sizes(), full_grads_.options().dtype(at::kFloat));
  } else {
    shared_.gradients().allocate(full_grads_);
  }
  gradients_live_ = true;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (params_[i].second.requires_grad()) nn::lend_gradient(params_[i].second, view_of(gradients(), i));
  }
}

void FlatUnit::show_gradients() {
  for (size_t i = 0; i < params_.size(); ++i) {
    at::Tensor leaf = params_[i].second;
    if (leaf.requires_grad() && !leaf.grad().defined()) leaf.mutable_grad() = view_of(gradients(), i);
  }
}

/// At the end of a pass: padding is zero, and so are gradients that nobody computed.
void FlatUnit::clear_unwritten() {
  int64_t written = 0;
  const auto clear_until = [&](int64_t begin) {
    if (begin > written) gradients().narrow(0, written, begin - written).zero_();
  };
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].second.grad().defined()) continue;
    clear_until(layout_.entries()[i].offset);
    written = layout_.entries()[i].end();
  }
  clear_until(layout_.numel());
  show_gradients();
}

void FlatUnit::set_progress(const Progress& progress) {
  whole_sum_ = progress.whole_sum;
  reduced_any_ = progress.reduced_any;
  reducing_ = false;  // whoever ended a pass has waited
  if (!progress.gradients_live) return forget_gradients();
  gradients_live_ = true;
  show_gradients();
}

void FlatUnit::take_gradient(size_t index) {
  at::Tensor leaf = params_[index].second;
  at::Tensor grad = leaf.grad();
  if (!grad.defined()) return;
  if (grad.layout() != at::kStrided) grad = grad.to_dense();
  if (grad.is_alias_of(gradients())) return;
  const at::NoGradGuard no_grad;
  prepare_gradients();
  at::Tensor place = view_of(gradients(), index);
  leaf.mutable_grad() = place.copy_(grad);
}

at::Tensor FlatUnit::reduced_shard() const {
  return options_.policy.shard_optimizer ? reduced_ : shard_of(reduced_);
}

at::Tensor FlatUnit::accumulated_gradient(size_t index) const {
  TRIREME_CHECK(gradients_live_, "[parallel.flat_unit] unit {} has no gradient in this step yet", name_);
  return view_of(gradients(), index);
}

/// The next gradient of a parameter is a new one and is not added to this one.
void FlatUnit::forget_gradients() {
  gradients_live_ = false;
  for (auto& [name, leaf] : params_) {
    leaf.mutable_grad().reset();
    nn::lend_gradient(leaf, {});
  }
}

at::Tensor FlatUnit::wire_gradients() {
  if (!whole_sum_.defined() || options_.reduce != options_.compute) return gradients().to(options_.reduce);
  return full_grads_.copy_(whole_sum_);  // where peers can read it
}

void FlatUnit::start_reduce(bool last_micro_batch) {
  if (!gradients_live_) return;
  const at::NoGradGuard no_grad;
  clear_unwritten();
  if (!last_micro_batch && reduces_once()) return;
  if (puts_reduction_off()) {
    SideStream::mark(complete_, options_.device);
    return forget_gradients();
  }
  ends_step_ = last_micro_batch;
  const bool copies_sum = whole_sum_.defined() && options_.reduce == options_.compute && !reduces_locally();
  if (copies_sum) shared_.gradients().allocate(full_grads_);
  if (buffers_.reduced_comes_and_goes) shared_.sums.allocate(reduced_);
  reduced_event_ = shared_.reduce.run([this] { reduce(ends_step_); }, {}, reduced_event_);
  reducing_ = true;
  forget_gradients();
}

bool FlatUnit::puts_reduction_off() const {
  return !alone_ && is_recording(options_.device);
}

void FlatUnit::start_launched_reduce() {
  const at::NoGradGuard no_grad;
  ends_step_ = true;
  reduced_event_ = shared_.reduce.run_beside([this] { reduce(ends_step_); }, complete_, reduced_event_);
  reducing_ = true;
}

void FlatUnit::reduce_over_ranks(at::Tensor& shard, const at::Tensor& wire) {
  if (compressor_) return compressor_->reduce(*groups_.shard, shard, wire);
  if (options_.reduction == Reduction::kOrdered) {
    groups_.shard->reduce_scatter_ordered(shard, wire);
    if (groups_.replicate->size() == 1) return;
    at::Tensor piece = piece_of_shard(shard);
    groups_.replicate->reduce_scatter_ordered(piece, shard);
    groups_.replicate->all_gather(shard, piece);
    return;
  }
  at::Tensor sum = at::empty({shard.numel()}, wire.options());
  groups_.shard->reduce_scatter(sum, wire);
  if (groups_.replicate->size() > 1) groups_.replicate->all_reduce(sum, comm::ReduceOp::kSum);
  shard.copy_(sum);
}

void FlatUnit::reduce(bool last_micro_batch) {
  sum_copies();
  const comm::Subject working_on(*groups_.shard, subject());
  if (reduces_locally()) return take_local_gradients(last_micro_batch);
  if (compressor_) multiply(gradients(), shared_.before_hook);
  const at::Tensor wire = wire_gradients();
  if (is_alone()) return measure_gradient();
  at::Tensor shard = reduced_shard();
  if (reduced_any_) {
    at::Tensor sum = at::empty_like(shard);
    reduce_over_ranks(sum, wire);
    shard.add_(sum);
  } else {
    reduce_over_ranks(shard, wire);
  }
  reduced_any_ = true;
  if (last_micro_batch) measure_gradient();
}

/// Each rank has the gradient of its own rows, and those that have the same elements add them up in the order
/// of ranks.
void FlatUnit::sum_copies() {
  if (groups_.tp->size() == 1) return;
  std::vector<size_t> copied;
  for (size_t i = 0; i < params_.size(); ++i)
    if (layout_.entries()[i].part.copies > 1) copied.push_back(i);
  if (copied.empty()) return;
  std::vector<at::Tensor> mine;
  for (const size_t i : copied) mine.push_back(view_of(gradients(), i).reshape({-1}).to(at::kFloat));
  const comm::Subject working_on(*groups_.tp, subject());
  const at::Tensor all = comm::gather_rows(*groups_.tp, at::cat(mine));
  int64_t offset = 0;
  for (const size_t i : copied) {
    const plan::FlatEntry& entry = layout_.entries()[i];
    const int64_t copies = entry.part.copies, first = groups_.tp->rank() / copies * copies;
    at::Tensor sum = all[first].narrow(0, offset, entry.numel).clone();
    for (int64_t rank = first + 1; rank < first + copies; ++rank)
      sum.add_(all[rank].narrow(0, offset, entry.numel));
    view_of(gradients(), i).copy_(sum.view(entry.shape));
    offset += entry.numel;
  }
}

/// Runs beside the reductions of units to come; only the update waits for it.
void FlatUnit::gather_sum() {
  const auto gather = [this] {
    const comm::Subject working_on(*groups_.shard, subject());
    groups_.shard->all_gather(reduced_, reduced_shard());
  };
  sum_gathered_ = shared_.unshard.run_beside(gather, reduced_event_, sum_gathered_);
}

void FlatUnit::wait_for_sum() {
  shared_.unshard.wait(sum_gathered_);
}

/// Local SGD: a rank's own gradient stands for that of all, so it counts as often as there are ranks.
void FlatUnit::take_local_gradients(bool last_micro_batch) {
  const at::Tensor local = gradients().to(at::kFloat) * static_cast<double>(groups_.shard->size());
  reduced_any_ ? reduced_.add_(local) : reduced_.copy_(local);
  reduced_any_ = true;
  if (last_micro_batch) measure_gradient();
}

/// The part of the reduced gradient that this rank measures. Local SGD: all of it, since no other rank has
/// it.
plan::Range FlatUnit::measured_range() const {
  if (reduces_locally()) return {0, layout_.numel()};
  const int64_t size = layout_.shard_numel(), first = shard_range().begin + groups_.replicate->rank() * size;
  return {first, first + size};
}

/// The squares of ranks add up. Under local SGD the sum is the mean over the ranks' squares, which is no less
/// than the square of the mean gradient.
void FlatUnit::measure(at::Tensor& squares, const plan::Range& part) const {
  kernels::sum_of_squares(squares, reduced_.narrow(0, part.begin - optimizer_range().begin, part.size()));
  if (reduces_locally()) squares.div_(static_cast<double>(groups_.shard->size()));
}

void FlatUnit::measure_gradient() {
  measure_counted(grad_squares_);
}

/// The first copy of a parameter counts, and no other. Without copies that is all of the range at once.
void FlatUnit::measure_counted(at::Tensor& squares) const {
  const plan::Range range = measured_range();
  int64_t begin = range.begin;
  std::vector<plan::Range> runs;
  for (const plan::FlatEntry& entry : layout_.entries()) {
    if (entry.part.copy == 0) continue;
    const plan::Range copy = plan::intersect(range, {entry.offset, entry.end()});
    if (copy.size() == 0) continue;
    if (copy.begin > begin) runs.push_back({begin, copy.begin});
    begin = copy.end;
  }
  if (begin < range.end) runs.push_back({begin, range.end});
  if (runs.size() == 1) return measure(squares, runs.front());
  squares.zero_();
  for (const plan::Range& run : runs) {
    at::Tensor of_run = at::zeros_like(squares);
    measure(of_run, run);
    squares.add_(of_run);
  }
}

at::Tensor FlatUnit::grad_squares_of(size_t index) const {
  const plan::FlatEntry& entry = layout_.entries()[index];
  const plan::Range part = plan::intersect(measured_range(), {entry.offset, entry.end()});
  at::Tensor squares = at::zeros_like(grad_squares_);
  if (part.size() > 0 && entry.part.copy == 0) measure(squares, part);
  return squares;
}

void FlatUnit::finish_reduce() {
  if (!reducing_) return;
  shared_.reduce.wait(reduced_event_);
  reducing_ = false;
  if (ends_step_) whole_sum_.reset();
  if (!keeps_gradients()) shared_.gradients().free(full_grads_);
}

void FlatUnit::drop_gradients() {
  finish_reduce();
  if (compressor_) compressor_->discard();
  reduced_any_ = false;
  whole_sum_.reset();
  forget_gradients();
  hide_piece_gradients();
  if (!keeps_gradients()) shared_.gradients().free(full_grads_);
}

void FlatUnit::clear_gradients() {
  drop_gradients();
  grad_squares_.zero_();
}

std::string FlatUnit::nonfinite_parameter() const {
  if (!trainable() || !has_storage(reduced_)) return {};
  SideStream::follow(sum_gathered_, options_.device);
  const plan::Range range = optimizer_range();
  for (const plan::FlatEntry& entry : layout_.entries()) {
    const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
    if (part.size() == 0) continue;
    if (!reduced_.narrow(0, part.begin - range.begin, part.size()).isfinite().all().item<bool>())
      return entry.name;
  }
  return {};
}

}  // namespace trireme::parallel
