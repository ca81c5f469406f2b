#include "trireme/parallel/agreement.h"

#include <algorithm>
#include <cmath>

#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/comm/agree.h"

namespace trireme::parallel {

void check_alike(const std::vector<std::string>& lines, const std::exception_ptr& refusal,
                 const comm::Mesh& mesh, const char* operation) {
  const std::string mine = join(lines, "\n");
  const auto [upper, lower] = comm::in_halves(xxh3(mine));
  const auto rows =
      comm::gather_or_throw(*mesh.stage, {upper, lower}, refusal, fmt::format("parallel.{}", operation));
  const auto other = std::ranges::find_if(rows, [&](const auto& rank) { return rank != rows.front(); });
  if (other == rows.end()) return;
  const int64_t first_rank = mesh.stage->ranks().front(), rank = mesh.world->rank();
  const std::string first = comm::text_of(*mesh.stage, 0, mine);
  if (first == mine) {
    throw LogicError(
        "[parallel.{}] rank {} has a different module than rank {}, or different options; its message names "
        "the first difference",
        operation, mesh.stage->ranks()[static_cast<size_t>(other - rows.begin())], rank);
  }
  const std::vector<std::string> others = split(first, '\n');
  const auto differs = std::ranges::mismatch(lines, others);
  throw LogicError(
      "[parallel.{}] ranks have different modules: rank {} has '{}' where rank {} has '{}'; build the same "
      "module with the same options on all ranks, and register parameters and buffers in the same order",
      operation, rank, *differs.in1, first_rank, *differs.in2);
}

namespace {

/// The tolerance of kernels that add up in no fixed order.
double rounding_of(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? 1e-2 : 1e-5;
}

bool differ(double a, double b, double rounding) {
  if (!std::isfinite(a) || !std::isfinite(b)) return std::isfinite(a) != std::isfinite(b);
  return std::abs(a - b) > rounding * std::max(std::abs(a), std::abs(b));
}

}  // namespace

void check_same_loss(const at::Tensor& loss, const comm::Mesh& mesh) {
  const auto losses =
      comm::gather_scalars(*mesh.stage, {loss.item<double>(), rounding_of(loss.scalar_type())});
  const auto tp = static_cast<size_t>(mesh.tp->size());
  for (size_t rank = 0; rank < losses.size(); ++rank) {
    const size_t first_rank = rank / tp * tp;
    const double first = losses[first_rank][0], other = losses[rank][0];
    if (!differ(first, other, std::max(losses[first_rank][1], losses[rank][1]))) continue;
    throw LogicError(
        "[parallel.backward] ranks {} and {} share layers along tp, but their losses are {} and {}; give "
        "both the same batch (by Mesh::dp_rank), seed dropout alike, and join split rows before another "
        "loss than VocabParallelCrossEntropy",
        mesh.stage->ranks()[first_rank], mesh.stage->ranks()[rank], first, other);
  }
}

}  // namespace trireme::parallel
