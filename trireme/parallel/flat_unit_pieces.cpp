// A unit's masters and gradients as tensors a parameter, for optimizers that know nothing of flat ranges.
#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/kernels/tensor_ops.h"
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
    // Not a view for autograd: zero_grad() of torch's optimizers cannot detach one in place.
    piece.master.mutable_grad() = grad.variable_data();
  }
}

void FlatUnit::scale_piece_gradients(double factor) {
  const at::NoGradGuard no_grad;
  for (Piece& piece : pieces_) {
    if (at::Tensor grad = piece.master.grad(); grad.defined()) grad.mul_(factor);
  }
}

at::Tensor FlatUnit::piece_grad_squares_of(size_t index) const {
  const at::NoGradGuard no_grad;
  at::Tensor squares = at::zeros_like(grad_squares_);
  const at::Tensor& grad = pieces_[index].master.grad();
  const plan::Range owned = owned_part(index), part = plan::intersect(measured_range(), owned);
  if (!grad.defined() || part.size() == 0 || layout_.entries()[index].part.copy > 0) return squares;
  const at::Tensor flat = grad.to(at::kFloat).reshape({-1});
  kernels::sum_of_squares(squares, flat.narrow(0, part.begin - owned.begin, part.size()));
  return reduces_locally() ? squares.div_(static_cast<double>(groups_.shard->size())) : squares;
}

at::Tensor FlatUnit::piece_grad_squares() const {
  at::Tensor sum = at::zeros_like(grad_squares_);
  if (shows_reduced()) {
    measure_counted(sum);  // in one go, as at the reduction, so that policies agree
    return sum;
  }
  for (const Piece& piece : pieces_) sum.add_(piece_grad_squares_of(piece.param));
  return sum;
}

/// Whether the gradients of pieces are what was reduced, in its place, although perhaps with other values.
bool FlatUnit::shows_reduced() const {
  if (!trainable() || reduced_.scalar_type() != at::kFloat || !has_storage(reduced_)) return false;
  return std::ranges::all_of(pieces_, [this](const Piece& piece) {
    const at::Tensor& grad = piece.master.grad();
    const at::Tensor place = piece_of(reduced_, optimizer_range(), layout_.entries()[piece.param]);
    return grad.defined() && grad.is_set_to(place);
  });
}

void FlatUnit::hide_piece_gradients() {
  for (Piece& piece : pieces_) piece.master.mutable_grad().reset();
}

SideStream::Event FlatUnit::take_pieces() {
  const at::NoGradGuard no_grad;
  hide_piece_gradients();
  const auto copy_masters = [this] {
    if (at::Tensor copy = compute_copy(); copy.defined()) copy.copy_(master_);
  };
  return shared_.reduce.run_untimed(copy_masters, updated_);
}

}  // namespace trireme::parallel
