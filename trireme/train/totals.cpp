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

// Columns of a row: the squares of each unit follow.
constexpr size_t kLoss = 0, kSquares = 1, kPeak = 2, kActive = 3, kReserved = 4, kSignal = 5, kUnits = 6;

/// Failures that the device met come to light when the host has waited for it.
void check_groups(const comm::Mesh& mesh) {
  for (comm::Group* group : {mesh.all.get(), mesh.dp.get(), mesh.shard.get(), mesh.replicate.get()}) {
    group->check();
  }
}

/// The first unit of `row`, by rank `rank`, whose gradient is not finite; empty: none.
std::string not_finite_in(const Parts& parts, const std::vector<double>& row, size_t rank) {
  const auto& units = parts.engine->units();
  for (size_t unit = 0; unit < units.size(); ++unit) {
    if (!std::isfinite(row[kUnits + unit])) return fmt::format("rank {}: unit {}", rank, units[unit]->name());
  }
  return {};
}

}  // namespace

at::Tensor gather_totals(const Parts& parts, const at::Tensor& loss_sum) {
  const kernels::MemoryPeak peak = parts.on_gpu()
                                       ? kernels::gpu_memory_peak()
                                       : kernels::MemoryPeak{.allocated = kernels::resident_peak()};
  const auto symmetric = static_cast<double>(parts.engine->symmetric_bytes());
  at::Tensor host = at::tensor(
      {static_cast<double>(peak.allocated) + symmetric, static_cast<double>(peak.active) + symmetric,
       static_cast<double>(peak.reserved) + symmetric, static_cast<double>(signal_heard(parts.options))},
      at::kDouble);
  if (parts.on_gpu()) host = host.pin_memory();  // else the copy would wait for the device
  const at::Tensor squares = parts.engine->unit_grad_squares();
  const at::Tensor mine = at::cat(
      {at::stack({loss_sum, squares.sum()}), host.to(parts.world->device(), /*non_blocking=*/true), squares});
  return comm::gather_rows(*parts.mesh.all, mine);
}

at::Tensor grad_norm_of(const Parts& parts, const at::Tensor& rows) {
  return parts.engine->sum_over_ranks(rows.select(1, static_cast<int64_t>(kSquares))).sqrt();
}

StepTotals read_totals(const Parts& parts, const at::Tensor& rows, double loss_scale) {
  StepTotals totals;
  std::vector<double> squares;
  for (const std::vector<double>& rank : comm::to_numbers(rows)) {
    totals.loss += rank[kLoss];
    totals.peak_bytes = std::max(totals.peak_bytes, rank[kPeak]);
    totals.active_bytes = std::max(totals.active_bytes, rank[kActive]);
    totals.reserved_bytes = std::max(totals.reserved_bytes, rank[kReserved]);
    totals.stop_signal = std::max(totals.stop_signal, static_cast<int>(rank[kSignal]));
    if (totals.not_finite.empty()) totals.not_finite = not_finite_in(parts, rank, squares.size());
    squares.push_back(rank[kSquares]);
  }
  check_groups(parts.mesh);
  totals.loss /= static_cast<double>(parts.batch.accumulation * parts.batch.dp_size);
  totals.grad_norm = std::sqrt(parts.engine->sum_over_ranks(squares)) / loss_scale;
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
