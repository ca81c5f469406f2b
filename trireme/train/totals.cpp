#include "trireme/train/totals.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trireme/kernels/device.h"
#include "trireme/train/stop.h"

namespace trireme::train {
namespace {

// Columns of a row: the squares of each stage follow, then those of each unit.
constexpr size_t kLoss = 0, kPeak = 1, kActive = 2, kReserved = 3, kSignal = 4, kStages = 5;

size_t stages_in(size_t columns, const Parts& parts) {
  return columns - kStages - parts.model->units().size();
}

/// Throws for failures of collectives that the device met: they show once the host has waited for it.
void check_groups(const comm::Mesh& mesh) {
  for (comm::Group* group :
       {mesh.all.get(), mesh.dp.get(), mesh.pp.get(), mesh.shard.get(), mesh.replicate.get(), mesh.cp.get(),
        mesh.tp.get(), mesh.tp_gradients.get(), mesh.stage.get()}) {
    group->check();
  }
}

/// The first unit of `row`, by rank `rank`, whose gradient is not finite; empty: none.
std::string not_finite_in(const Parts& parts, const std::vector<double>& row, size_t rank) {
  const auto& units = parts.model->units();
  const size_t first = row.size() - units.size();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (!std::isfinite(row[first + unit])) return fmt::format("rank {}: unit {}", rank, units[unit]);
  }
  return {};
}

}  // namespace

at::Tensor gather_totals(const Parts& parts, const at::Tensor& loss) {
  const kernels::MemoryPeak peak = parts.on_gpu()
                                       ? kernels::gpu_memory_peak()
                                       : kernels::MemoryPeak{.allocated = kernels::resident_peak()};
  const auto symmetric = static_cast<double>(parts.model->symmetric_bytes());
  at::Tensor host = at::tensor(
      {static_cast<double>(peak.allocated) + symmetric, static_cast<double>(peak.active) + symmetric,
       static_cast<double>(peak.reserved) + symmetric, static_cast<double>(signal_heard(parts.options))},
      at::kDouble);
  if (parts.on_gpu()) host = host.pin_memory();  // else the copy would wait for the device
  const at::Tensor mine = at::cat({loss.reshape({1}), host.to(parts.world->device(), /*non_blocking=*/true),
                                   parts.model->grad_squares()});
  return comm::gather_rows(*parts.mesh.all, mine);
}

at::Tensor grad_norm_of(const Parts& parts, const at::Tensor& rows) {
  const auto stages = static_cast<int64_t>(stages_in(static_cast<size_t>(rows.size(1)), parts));
  return parts.model->sum_over_ranks(rows.narrow(1, static_cast<int64_t>(kStages), stages)).sqrt();
}

StepTotals read_totals(const Parts& parts, const at::Tensor& rows, double loss_scale) {
  StepTotals totals;
  std::vector<std::vector<double>> squares;
  totals.peak_by_pp_rank.resize(static_cast<size_t>(parts.mesh.shape.size(plan::Axis::kPp)), 0.0);
  for (const std::vector<double>& rank : comm::to_numbers(rows)) {
    totals.loss += rank[kLoss];
    totals.peak_bytes = std::max(totals.peak_bytes, rank[kPeak]);
    const auto place = parts.mesh.shape.coordinates(static_cast<int64_t>(squares.size()));
    double& stage_peak =
        totals.peak_by_pp_rank[static_cast<size_t>(place[static_cast<size_t>(plan::Axis::kPp)])];
    stage_peak = std::max(stage_peak, rank[kPeak]);
    totals.active_bytes = std::max(totals.active_bytes, rank[kActive]);
    totals.reserved_bytes = std::max(totals.reserved_bytes, rank[kReserved]);
    totals.stop_signal = std::max(totals.stop_signal, static_cast<int>(rank[kSignal]));
    if (totals.not_finite.empty()) totals.not_finite = not_finite_in(parts, rank, squares.size());
    const auto first = rank.begin() + kStages;
    squares.emplace_back(first, first + static_cast<std::ptrdiff_t>(stages_in(rank.size(), parts)));
  }
  check_groups(parts.mesh);
  totals.grad_norm = std::sqrt(parts.model->sum_over_ranks(squares)) / loss_scale;
  return totals;
}

TotalsOnTheWay::TotalsOnTheWay(const at::Tensor& rows) : host_(rows) {
  if (rows.is_cpu()) return;
  host_ = at::empty(rows.sizes(), rows.options().device(at::kCPU).pinned_memory(true));
  host_.copy_(rows, /*non_blocking=*/true);
  arrived_.emplace(rows.device().type());
  arrived_->record(c10::impl::VirtualGuardImpl(rows.device().type()).getStream(rows.device()));
}

const at::Tensor& TotalsOnTheWay::wait() {
  if (arrived_) arrived_->synchronize();
  return host_;
}

}  // namespace trireme::train
