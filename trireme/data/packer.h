#pragma once
// From documents to token shards: tokenises what a source holds and packs it into the two splits of a folder.
#include <cstdint>
#include <string>

#include "trireme/data/index.h"
#include "trireme/data/source.h"
#include "trireme/data/tokenizer.h"

namespace trireme::data {

/// Writes train-*.tokens, val-*.tokens and index.json into `folder`, which must be new and empty. Documents
/// of a split follow each other in source order with one separator token between two. A source of several
/// documents has at least one in either split (when val_fraction > 0); a single document is cut in the ratio.
/// Warns once when text is not UTF-8. Throws DataError when a file cannot be read or changes meanwhile,
/// EnvironmentError when a write fails.
TokenIndex pack(const Source& source, const Tokenizer& tokenizer, double val_fraction,
                const std::string& folder);

}  // namespace trireme::data
