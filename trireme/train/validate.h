#pragma once
// Loss on held-out text, exact whatever the number of ranks.
#include <cstdint>
#include <functional>
#include <optional>

#include "trireme/comm/mesh.h"
#include "trireme/data/dataset.h"
#include "trireme/train/trained_model.h"

namespace trireme::train {

/// Mean loss in nats per token over the first `samples` samples of `dataset` (all when it has fewer), each
/// counted once: data-parallel ranks take contiguous parts, and a rank that runs out joins the others'
/// collectives with weight 0. Before each round it asks `gives_up`, which answers alike on all ranks; none:
/// it did. Collective.
std::optional<double> validation_loss(
    TrainedModel& model, const data::Dataset& dataset, int64_t samples, int64_t micro_batch,
    const comm::Mesh& mesh, const std::function<bool()>& gives_up = [] { return false; });

}  // namespace trireme::train
