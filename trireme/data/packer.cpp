#include "trireme/data/packer.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/data/documents.h"
#include "trireme/data/shard.h"
#include "trireme/data/utf8.h"

namespace trireme::data {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;  // text tokenised at once

/// The whole file, mapped: a text larger than memory is paged in and out as it is read.
MappedFile map_text(const Source& source, const SourceFile& file) {
  const std::string path = source.path_of(file);
  MappedFile text;
  try {
    text = MappedFile(path);
  } catch (const EnvironmentError& error) {
    throw DataError("[data.corpus] {}; make the file readable, or take it out of the folder", error.what());
  }
  if (static_cast<int64_t>(text.bytes().size()) != file.bytes) {
    throw DataError(
        "[data.corpus] {} changed while it was read: {} bytes, now {}; run again when nobody writes to it",
        path, file.bytes, text.bytes().size());
  }
  return text;
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

class SplitPacker {
 public:
  SplitPacker(const Tokenizer& tokenizer, const std::string& folder, const std::string& split)
      : tokenizer_(tokenizer), writer_(folder, split, {.vocab_size = tokenizer.vocab_size()}) {}

  void add(std::string_view document) {
    if (document.empty()) return;
    const int32_t separator = tokenizer_.document_separator();
    if (documents_++ > 0) writer_.append({&separator, 1});
    add_rest(document);
  }

  /// More text of a document that began elsewhere.
  void add_rest(std::string_view text) {
    for (const std::string_view piece : pieces(text, kPieceBytes)) writer_.append(tokenizer_.encode(piece));
  }

  int64_t documents() const { return documents_; }

  SplitEntry finish() {
    SplitEntry entry = writer_.finish();
    entry.documents = documents_;
    return entry;
  }

 private:
  const Tokenizer& tokenizer_;
  SplitWriter writer_;
  int64_t documents_ = 0;
};

/// One pass over a source with one threshold of the held-out draw.
class Pass {
 public:
  Pass(const Tokenizer& tokenizer, const std::string& folder, double val_fraction)
      : val_fraction_(val_fraction), train_(tokenizer, folder, "train"), val_(tokenizer, folder, "val") {}

  void run(const Source& source, uint64_t threshold) {
    for (const SourceFile& file : source.files) {
      const MappedFile mapped = map_text(source, file);
      const std::string_view text = text_of(mapped);
      if (not_utf8_.empty() && !is_utf8(text)) not_utf8_ = source.path_of(file);
      const std::vector<std::string_view> documents = split_documents(text);
      if (source.files.size() == 1 && documents.size() == 1) return add_cut(documents[0]);
      for (size_t i = 0; i < documents.size(); ++i) add(documents[i], held_out_draw(file.name, i), threshold);
    }
  }

  /// The threshold that gives the empty split a document, when there are enough of them.
  std::optional<uint64_t> better_threshold() const {
    if (val_fraction_ == 0.0 || train_.documents() + val_.documents() < 2) return std::nullopt;
    if (val_.documents() == 0) return lowest_draw_ + 1;
    if (train_.documents() == 0) return highest_draw_;
    return std::nullopt;
  }

  std::map<std::string, SplitEntry> finish() { return {{"train", train_.finish()}, {"val", val_.finish()}}; }
  const std::string& not_utf8() const { return not_utf8_; }

 private:
  void add(std::string_view document, uint64_t draw, uint64_t threshold) {
    lowest_draw_ = std::min(lowest_draw_, draw);
    highest_draw_ = std::max(highest_draw_, draw);
    (draw < threshold ? val_ : train_).add(document);
  }

  void add_cut(std::string_view document) {
    const auto [train, val] = cut_document(document, val_fraction_);
    train_.add(train);
    val_.add_rest(val);
  }

  double val_fraction_;
  SplitPacker train_, val_;
  uint64_t lowest_draw_ = std::numeric_limits<uint64_t>::max();
  uint64_t highest_draw_ = 0;
  std::string not_utf8_;  ///< path of the first file that is not UTF-8
};

Pass run_pass(const Source& source, const Tokenizer& tokenizer, double val_fraction, uint64_t threshold,
              const std::string& folder) {
  Pass pass(tokenizer, folder, val_fraction);
  pass.run(source, threshold);
  return pass;
}

/// Runs again with the threshold moved when a split got no document, which happens to small corpora only.
Pass run_passes(const Source& source, const Tokenizer& tokenizer, double val_fraction,
                const std::string& folder) {
  Pass first = run_pass(source, tokenizer, val_fraction, held_out_threshold(val_fraction), folder);
  const std::optional<uint64_t> better = first.better_threshold();
  if (!better) return first;
  for (const auto& file : std::filesystem::directory_iterator(folder)) std::filesystem::remove(file);
  return run_pass(source, tokenizer, val_fraction, *better, folder);
}

}  // namespace

TokenIndex pack(const Source& source, const Tokenizer& tokenizer, double val_fraction,
                const std::string& folder) {
  Pass pass = run_passes(source, tokenizer, val_fraction, folder);
  if (!pass.not_utf8().empty()) {
    log_warning("[data.corpus] {} is not UTF-8 (the first such file); its bytes are taken as they are",
                pass.not_utf8());
  }
  TokenIndex index{.tokenizer = tokenizer.name(),
                   .vocab_size = tokenizer.vocab_size(),
                   .source = source.path,
                   .source_files = static_cast<int64_t>(source.files.size()),
                   .source_bytes = source.bytes,
                   .val_fraction = val_fraction,
                   .splits = pass.finish()};
  write_index(folder, index);
  return index;
}

}  // namespace trireme::data
