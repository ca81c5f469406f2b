#pragma once
// The corpus of a run, made ready before the first step: by one rank of a host, while the others wait.
#include "trireme/comm/mesh.h"
#include "trireme/data/corpus.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

/// However long that takes, as long as some rank makes headway: the world's timeout is the longest time
/// without any. Rank 0 logs how far it has come. Collective. Throws what data::prepare_corpus() throws on
/// the first rank that failed, FailedElsewhere on the others; Stopped when a rank has been sent a signal;
/// EnvironmentError when nothing moves; DataError when ranks read different text, ConfigError when the corpus
/// has ids beyond the model's vocabulary. A preparation that is not completed leaves nothing in the cache.
data::PreparedCorpus prepare_data(const TrainOptions& run, const comm::Mesh& mesh);

}  // namespace trireme::train
