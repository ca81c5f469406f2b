// A unit's masters and gradients as tensors a parameter, for optimizers that know nothing of flat ranges.
#include <ATen/ATen.h>

#include "trireme/parallel/flat_unit.h"
#include "trireme/parallel/gradient_mean.h"

namespace trireme::parallel {
namespace {

/// The part of a flat tensor of `range` that belongs to `entry`, of the entry's shape if it is all of it.
at::Tensor piece_of(const at::Tensor& flat, const plan::Range& range, const plan::FlatEntry& entry) {
  const plan::Range part = plan::intersect(range, {entry.offset, entry.end()});
  if (part.size() == 0) return flat.narrow(0, 0, 0);
  const at::Tensor piece = flat.narrow(0, part.begin - range.begin, part.size());
  return part.size() == entry.numel ? piece.view(entry.shape) : piece;
}

}  // namespace

void FlatUnit::make_pieces() {
  if (!pieces_.empty()) return;
  const at::NoGradGuard no_grad;
  // A storage of its own over the master's memory: watching it shows writes to pieces alone.
  const at::Tensor masters = at::from_blob(
      master_.mutable_data_ptr(), master_.sizes(), [master = master_](void*) {}, master_.options());
  for (size_t i = 0; i < params_.size(); ++i)
    pieces_.push_back({i, piece_of(masters, optimizer_range(), layout_.entries()[i])});
}

void FlatUnit::show_piece_gradients(const optim::GradScale& factor) {
  if (!trainable() || !(reduced_any_ || is_alone())) return;
  const at::NoGradGuard no_grad;
  wait_for_sum();
  const bool in_place = reduced_.scalar_type() == at::kFloat;
  if (in_place) multiply(reduced_, factor);
  for (Piece& piece : pieces_) {
    if (!params_[piece.param].second.requires_grad()) continue;
    at::Tensor grad = piece_of(reduced_, optimizer_range(), layout_.entries()[piece.param]);
    if (!in_place) {
      grad = grad.to(at::kFloat);
      multiply(grad, factor);
    }
    piece.master.mutable_grad() = grad;
  }
}

void FlatUnit::scale_piece_gradients(double factor) {
  const at::NoGradGuard no_grad;
  for (Piece& piece : pieces_) {
    if (at::Tensor grad = piece.master.grad(); grad.defined()) grad.mul_(factor);
  }
}

void FlatUnit::hide_piece_gradients() {
  for (Piece& piece : pieces_) piece.master.mutable_grad().reset();
}

void FlatUnit::publish_pieces() {
  const at::NoGradGuard no_grad;
  hide_piece_gradients();
  const auto copy_masters = [this] {
    if (at::Tensor copy = compute_copy(); copy.defined()) copy.copy_(master_);
  };
  publish_update(shared_.reduce.run_untimed(copy_masters, updated_));
}

}  // namespace trireme::parallel
