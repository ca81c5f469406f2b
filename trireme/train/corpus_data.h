#pragma once
// Corpora of text for a run, one or several.
#include <string>
#include <vector>

#include "trireme/data/corpus.h"
#include "trireme/train/run_data.h"
#include "trireme/train/token_data.h"

namespace trireme::train {

/// Prepares the text at `path` as the config of the run says, or finds it prepared.
data::PreparedCorpus open_corpus(const TrainOptions& run, const std::string& path,
                                 const data::OnProgress& on_progress);
/// One set with what is held out of it, or none where that is less than a sequence.
std::vector<HeldOutTokens> held_out_of(const data::PreparedCorpus& corpus, int64_t seq_len,
                                       const RunData::HeldOutSet& set);

}  // namespace trireme::train
