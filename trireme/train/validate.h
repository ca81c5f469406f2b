#pragma once
// Loss, and of images accuracy, on held-out samples: exact whatever the number of ranks.
#include <cstdint>
#include <functional>
#include <optional>

#include "trireme/train/run_data.h"
#include "trireme/train/trained_model.h"

namespace trireme::train {

struct Validation {
  double loss = 0.0;                 ///< mean, in nats per token or image
  std::optional<double> top1, top5;  ///< shares of images; none: of text
};

/// Over at most `samples` samples of what `data` holds out, each counted once. Batches are as those of
/// training. Before each round it asks `gives_up`, which answers alike on all ranks; none: it did. `guesses`,
/// if there are any, get the rows of this rank. Collective.
std::optional<Validation> validate(
    TrainedModel& model, const RunData& data, int64_t samples, const FeedOptions& batches,
    const comm::Mesh& mesh, const std::function<bool()>& gives_up = [] { return false; },
    Guesses* guesses = nullptr);

}  // namespace trireme::train
