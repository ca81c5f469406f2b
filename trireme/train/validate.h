#pragma once
// Loss, and of images accuracy, on held-out samples: exact whatever the number of ranks.
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "trireme/train/run_data.h"
#include "trireme/train/trained_model.h"

namespace trireme::train {

struct Validation {
  double loss = 0.0;                           ///< mean, in nats per token or image
  std::optional<double> top1, top5;            ///< shares of images; none: of text
  std::map<std::string, double> metrics = {};  ///< of the program, by their names
  double rows = 0.0;                           ///< or targets that count, behind the loss; of a single set
};

/// Validates on at most `samples` held-out samples of `data`, each counted once, in batches as in training.
/// Before each round it calls `gives_up`, which must answer alike on all ranks; when it is true the result is
/// none. Of several sets (RunData::held_out_sets()) each has its share of `samples`, at least one, and
/// results are means by their weights, beside loss/NAME and METRIC/NAME of each; sets in which nothing counts
/// are left out. `guesses`, unless null, gets
/// the rows of this rank. Collective.
std::optional<Validation> validate(
    TrainedModel& model, const RunData& data, int64_t samples, const FeedOptions& batches,
    const comm::Mesh& mesh, const std::function<bool()>& gives_up = [] { return false; },
    Guesses* guesses = nullptr);

}  // namespace trireme::train
