#pragma once
// The totals of a step over all ranks, once its gradients are there: one exchange of a few numbers.
#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>
#include <string>
#include <vector>

#include "trireme/train/parts.h"

namespace trireme::train {

/// Summed or maximised over the ranks; the same on all of them.
struct StepTotals {
  double loss = 0.0;       ///< mean over the global batch
  double grad_norm = 0.0;  ///< without the scale of the loss
  double peak_bytes = 0.0;
  std::vector<double> peak_by_pp_rank;
  double active_bytes = 0.0;
  double reserved_bytes = 0.0;
  int stop_signal = 0;
  std::string not_finite;  ///< "rank 1: unit model.layers.3", the first whose gradient is not; empty: none
};

/// `loss`, what this rank adds to the mean, is an fp64 scalar on the device; everything travels in one piece:
/// (ranks, n) fp64, on the device. On a GPU the host does not wait. Collective.
at::Tensor gather_totals(const Parts& parts, const at::Tensor& loss);

/// The norm of the gradient, scaled as the loss is: a scalar where `rows` are.
at::Tensor grad_norm_of(const Parts& parts, const at::Tensor& rows);

/// Reads what gather_totals() gave; the host waits for it. Throws CommError when a collective has failed.
StepTotals read_totals(const Parts& parts, const at::Tensor& rows, double loss_scale);

/// Totals on their way from the current stream of a GPU to the host; on a CPU they are there.
class TotalsOnTheWay {
 public:
  explicit TotalsOnTheWay(const at::Tensor& rows);
  /// The host waits until they have arrived.
  const at::Tensor& wait();

 private:
  at::Tensor host_;
  std::optional<c10::Event> arrived_;
};

}  // namespace trireme::train
