#pragma once
// From documents to token shards: tokenises what a source holds and packs it into the two splits of a folder.
#include <cstdint>
#include <string>

#include "trireme/data/index.h"
#include "trireme/data/progress.h"
#include "trireme/data/source.h"
#include "trireme/data/tokenizer.h"

namespace trireme::data {

struct PackOptions {
  double val_fraction = 0.0;
  std::string folder = {};
  int64_t threads = 1;
  OnProgress on_progress = {};
};

/// Writes train-*.tokens, val-*.tokens and index.json into `folder`, which must be new and empty: the same
/// bytes on any number of threads, which hold 16 MiB each (encode_ahead.h), or the longest document.
/// Documents of a split follow each other in source order with one separator token between two. val_fraction
/// of the bytes of all documents is held out (held_out.h); at most one document is in both splits, and is cut
/// between two characters. The index says which
/// text is not UTF-8. Throws DataError when a file cannot be read or
/// changes meanwhile, EnvironmentError when a write fails.
TokenIndex pack(const Source& source, const Tokenizer& tokenizer, const PackOptions& options);

}  // namespace trireme::data
