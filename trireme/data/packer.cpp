#include "trireme/data/packer.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <string_view>

#include "trireme/base/utf8.h"
#include "trireme/data/document_file.h"
#include "trireme/data/documents.h"
#include "trireme/data/encode_ahead.h"
#include "trireme/data/held_out.h"
#include "trireme/data/shard.h"

namespace trireme::data {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;    // text tokenised at once, where it may be cut
constexpr size_t kWindowBytes = size_t{16} << 20;  // text checked at once
constexpr int64_t kPasses = 2;                     // over the text: one chooses, one packs

/// The whole text in windows that end between two characters, so that there is a word of progress after each.
bool is_utf8_text(std::string_view text, ProgressMeter& meter) {
  bool valid = true;
  while (!text.empty()) {
    const std::string_view window =
        text.substr(0, character_begin(text, std::min(kWindowBytes, text.size())));
    valid = valid && is_utf8(window);
    text.remove_prefix(window.size());
    meter.add(static_cast<int64_t>(window.size()));
  }
  return valid;
}

/// The findings of the first pass over a source.
struct Survey {
  HeldOut held_out;
  int64_t not_utf8_files = 0;
  std::string first_not_utf8;  ///< path
};

Survey survey(const Source& source, double val_fraction, ProgressMeter& meter) {
  HeldOutChooser chooser(val_fraction);
  Survey result;
  for (const SourceFile& file : source.files) {
    DocumentFile documents(source, file, [&] { meter.beat(); });
    bool valid = true;
    for (size_t index = 0; const auto document = documents.next(); ++index) {
      if (documents.is_utf8_by_format()) {
        meter.add(documents.last_bytes());
      } else if (!is_utf8_text(*document, meter)) {
        valid = false;
      }
      chooser.add(held_out_draw(file.name, index), static_cast<int64_t>(document->size()));
    }
    if (!valid && result.not_utf8_files++ == 0) result.first_not_utf8 = documents.path();
  }
  result.held_out = chooser.choose();
  return result;
}

/// Tokens of one split, with a separator between two texts.
class SplitPacker {
 public:
  SplitPacker(const Tokenizer& tokenizer, const std::string& folder, const std::string& split)
      : separator_(tokenizer.document_separator()),
        writer_(folder, split, {.vocab_size = tokenizer.vocab_size()}) {}

  /// Tokens of a text or of a part of it; `starts` one.
  void append(std::span<const int32_t> tokens, bool starts) {
    if (starts && texts_++ > 0) writer_.append({&separator_, 1});
    writer_.append(tokens);
  }
  /// The split where a document begins counts it.
  void count_document() { ++documents_; }

  SplitEntry finish() {
    SplitEntry entry = writer_.finish();
    entry.documents = documents_;
    return entry;
  }

 private:
  int32_t separator_;
  SplitWriter writer_;
  int64_t texts_ = 0, documents_ = 0;
};

/// Both splits, tokenised on threads.
class Packer {
 public:
  Packer(const Tokenizer& tokenizer, const std::string& folder, int64_t threads, ProgressMeter& meter)
      : cuts_anywhere_(tokenizer.cuts_anywhere()),
        train_(tokenizer, folder, "train"),
        val_(tokenizer, folder, "val"),
        meter_(meter),
        encode_(tokenizer, threads, [&meter] { meter.beat(); }) {}

  /// A document whose end from `cut` on is held out; it took `file_bytes`, which count once it is packed.
  void add(std::string_view document, size_t cut, int64_t file_bytes) {
    (cut > 0 ? train_ : val_).count_document();
    const double scale = static_cast<double>(file_bytes) / static_cast<double>(document.size());
    add_part(train_, document.substr(0, cut), scale);
    add_part(val_, document.substr(cut), scale);
  }

  std::map<std::string, SplitEntry> finish() {
    encode_.finish();
    return {{"train", train_.finish()}, {"val", val_.finish()}};
  }

 private:
  /// Where a cut would change the ids, the whole of it is tokenised at once: that takes 4 bytes of memory a
  /// token, and a few times the text if it is normalised.
  void add_part(SplitPacker& split, std::string_view text, double scale) {
    bool starts = true;
    for_each_piece(text, cuts_anywhere_ ? kPieceBytes : text.size(), [&](std::string_view piece) {
      encode_.add(piece,
                  [this, &split, starts, bytes = std::llround(static_cast<double>(piece.size()) * scale)](
                      std::span<const int32_t> ids) {
                    split.append(ids, starts);
                    meter_.add(bytes);
                  });
      starts = false;
    });
  }

  bool cuts_anywhere_;
  SplitPacker train_, val_;
  ProgressMeter& meter_;
  EncodeAhead encode_;  // last: it stops before what takes its ids goes
};

std::map<std::string, SplitEntry> write_splits(const Source& source, const Tokenizer& tokenizer,
                                               HeldOut held_out, const PackOptions& options,
                                               ProgressMeter& meter) {
  Packer packer(tokenizer, options.folder, options.threads, meter);
  for (const SourceFile& file : source.files) {
    DocumentFile documents(source, file, [&] { meter.beat(); });
    for (size_t index = 0; const auto document = documents.next(); ++index) {
      const auto size = static_cast<int64_t>(document->size());
      const int64_t held_out_bytes = held_out.take(held_out_draw(file.name, index), size);
      packer.add(*document, character_begin(*document, static_cast<size_t>(size - held_out_bytes)),
                 documents.last_bytes());
    }
  }
  return packer.finish();
}

}  // namespace

TokenIndex pack(const Source& source, const Tokenizer& tokenizer, const PackOptions& options) {
  ProgressMeter meter(options.on_progress);
  meter.expect(kPasses * source.bytes);
  const Survey found = survey(source, options.val_fraction, meter);
  TokenIndex index{.tokenizer = tokenizer.name(),
                   .vocab_size = tokenizer.vocab_size(),
                   .source = source.path,
                   .source_files = static_cast<int64_t>(source.files.size()),
                   .source_bytes = source.bytes,
                   .not_utf8_files = found.not_utf8_files,
                   .first_not_utf8 = found.first_not_utf8,
                   .val_fraction = options.val_fraction,
                   .splits = write_splits(source, tokenizer, found.held_out, options, meter)};
  write_index(options.folder, index);
  return index;
}

}  // namespace trireme::data
