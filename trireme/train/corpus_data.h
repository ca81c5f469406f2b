#pragma once
// Corpora of text for a run, one or several.
#include <memory>
#include <string>

#include "trireme/data/corpus.h"
#include "trireme/data/token_samples.h"
#include "trireme/train/run_data.h"

namespace trireme::train {

/// Prepares the text at `path` as the config of the run says, or finds it prepared.
data::PreparedCorpus open_corpus(const TrainOptions& run, const std::string& path,
                                 const data::OnProgress& on_progress);
/// What is held out of it; null: less than a sequence is.
std::shared_ptr<const data::TokenSamples> held_out_of(const data::PreparedCorpus& corpus, int64_t seq_len);

}  // namespace trireme::train
