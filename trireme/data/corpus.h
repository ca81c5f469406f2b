#pragma once
// From text on disk to token shards in the cache: documents are listed in a fixed order, split
// into training and validation, tokenised, packed, checksummed and committed by rename. A second call finds
// the result by its key and verifies sizes only.
#include <cstdint>
#include <memory>
#include <string>

#include "trireme/data/progress.h"
#include "trireme/data/tokenizer.h"
#include "trireme/plan/choices.h"

namespace trireme::data {

struct CorpusOptions {
  std::string path = {};           ///< as list_source() takes it; "builtin": `builtin_root`
  std::string builtin_root = {};   ///< folder of C++ headers that "builtin" stands for
  std::string tokenizer = "byte";  ///< as make_tokenizer() takes it
  plan::DataFormat format = plan::DataFormat::kText;
  plan::LossOn loss_on = plan::LossOn::kAnswers;  ///< of conversations
  std::string chat_template = {};                 ///< as text::load_chat_template() takes it
  bool keep_apart = false;                        ///< shards say where conversations begin
  double val_fraction = 0.02;                     ///< of the bytes of all documents
  std::string cache_dir = {};
  int64_t seq_len = 0;  ///< of text only to refuse a corpus shorter than one sequence
  int64_t threads = 0;  ///< that tokenise; 0: as many as this process may use cores
  OnProgress on_progress = {};
};

struct PreparedCorpus {
  std::string folder;       ///< holds index.json, train-*.tokens, val-*.tokens
  std::string description;  ///< "9,350 files, 36.2 MiB, byte tokens" for the start-up lines
  int64_t train_tokens = 0;
  int64_t val_tokens = 0;
  int64_t vocab_size = 0;                      ///< ids are below it
  std::shared_ptr<const Tokenizer> tokenizer;  ///< that has made the tokens
  bool from_cache = false;
  std::string note = {};  ///< that text is not UTF-8, or conversations were cut; empty: neither
};

/// Prepares, or finds in the cache. Safe against two processes preparing the same corpus at once: one waits
/// as long as the other shows signs of life. A preparation that fails or is given up leaves nothing in the
/// cache; what a killed one left, the next removes. Throws ConfigError (exit 2) when the corpus is missing,
/// not readable by this user, empty or shorter than one sequence, naming path and sizes, and DataError (exit
/// 7) when it cannot be read. Text that is not UTF-8 is taken as bytes, or as the tokenizer
/// takes it, and PreparedCorpus::note says so.
PreparedCorpus prepare_corpus(const CorpusOptions& options);

}  // namespace trireme::data
