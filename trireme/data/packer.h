#pragma once
// From documents to token shards: tokenises what a source holds and packs it into the two splits of a folder.
#include <cstdint>
#include <string>

#include "trireme/data/index.h"
#include "trireme/data/progress.h"
#include "trireme/data/source.h"
#include "trireme/data/tokenizer.h"

namespace trireme::data {

/// Writes train-*.tokens, val-*.tokens and index.json into `folder`, which must be new and empty. Documents
/// of a split follow each other in source order with one separator token between two. val_fraction of the
/// bytes of all documents is held out (held_out.h); at most one document is in both splits, and is cut
/// between two characters. The index says which
/// text is not UTF-8. Throws DataError when a file cannot be read or
/// changes meanwhile, EnvironmentError when a write fails.
TokenIndex pack(const Source& source, const Tokenizer& tokenizer, double val_fraction,
                const std::string& folder, const OnProgress& on_progress = {});

}  // namespace trireme::data
