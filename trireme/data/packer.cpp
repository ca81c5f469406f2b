#include "trireme/data/packer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/utf8.h"
#include "trireme/data/documents.h"
#include "trireme/data/held_out.h"
#include "trireme/data/shard.h"

namespace trireme::data {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;    // text tokenised at once, where it may be cut
constexpr size_t kWindowBytes = size_t{16} << 20;  // text checked at once
constexpr int64_t kPasses = 2;                     // over the text: one chooses, one packs

/// The whole file, mapped: a text larger than memory is paged in and out as it is read.
MappedFile map_text(const Source& source, const SourceFile& file) {
  const std::string path = source.path_of(file);
  MappedFile text;
  try {
    text = MappedFile(path);
  } catch (const EnvironmentError& error) {
    throw DataError("[data.corpus] {}; make the file readable, or remove it from the folder", error.what());
  }
  if (static_cast<int64_t>(text.bytes().size()) != file.bytes) {
    throw DataError(
        "[data.corpus] {} changed while it was read: it had {} bytes and now has {}; run again when nothing "
        "writes to it",
        path, file.bytes, text.bytes().size());
  }
  return text;
}

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

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
  HeldOutChooser chooser(val_fraction, source.bytes);
  Survey result;
  for (const SourceFile& file : source.files) {
    const MappedFile mapped = map_text(source, file);
    const std::string_view text = text_of(mapped);
    if (!is_utf8_text(text, meter) && result.not_utf8_files++ == 0)
      result.first_not_utf8 = source.path_of(file);
    Documents documents(text, [&] { meter.beat(); });
    for (size_t index = 0; const auto document = documents.next(); ++index) {
      chooser.add(held_out_draw(file.name, index), static_cast<int64_t>(document->size()));
    }
  }
  result.held_out = chooser.choose();
  return result;
}

/// Tokens of one split, with a separator between two texts.
class SplitPacker {
 public:
  SplitPacker(const Tokenizer& tokenizer, const std::string& folder, const std::string& split,
              ProgressMeter& meter)
      : tokenizer_(tokenizer),
        writer_(folder, split, {.vocab_size = tokenizer.vocab_size()}),
        meter_(meter) {}

  /// A document, or a part of it; the split where it begins counts it. Where a cut would change the ids, the
  /// whole of it is tokenised at once: that takes 4 bytes of memory a token, a few times the text if it is
  /// normalised, and gives no sign of life until it is done.
  void add(std::string_view text, bool begins) {
    if (text.empty()) return;
    const int32_t separator = tokenizer_.document_separator();
    if (texts_++ > 0) writer_.append({&separator, 1});
    if (begins) ++documents_;
    const size_t limit = tokenizer_.cuts_anywhere() ? kPieceBytes : text.size();
    for_each_piece(text, limit, [this](std::string_view piece) {
      writer_.append(tokenizer_.encode(piece));
      meter_.add(static_cast<int64_t>(piece.size()));
    });
  }

  SplitEntry finish() {
    SplitEntry entry = writer_.finish();
    entry.documents = documents_;
    return entry;
  }

 private:
  const Tokenizer& tokenizer_;
  SplitWriter writer_;
  ProgressMeter& meter_;
  int64_t texts_ = 0, documents_ = 0;
};

std::map<std::string, SplitEntry> write_splits(const Source& source, const Tokenizer& tokenizer,
                                               const HeldOut& held_out, const std::string& folder,
                                               ProgressMeter& meter) {
  SplitPacker train(tokenizer, folder, "train", meter), val(tokenizer, folder, "val", meter);
  int64_t ordinal = 0;
  for (const SourceFile& file : source.files) {
    const MappedFile mapped = map_text(source, file);
    Documents documents(text_of(mapped), [&] { meter.beat(); });
    for (size_t index = 0; const auto document = documents.next(); ++index) {
      const auto size = static_cast<int64_t>(document->size());
      const int64_t held_out_bytes =
          held_out.bytes_of({.draw = held_out_draw(file.name, index), .ordinal = ordinal++}, size);
      const size_t cut = character_begin(*document, static_cast<size_t>(size - held_out_bytes));
      train.add(document->substr(0, cut), /*begins=*/true);
      val.add(document->substr(cut), /*begins=*/cut == 0);
    }
  }
  return {{"train", train.finish()}, {"val", val.finish()}};
}

}  // namespace

TokenIndex pack(const Source& source, const Tokenizer& tokenizer, double val_fraction,
                const std::string& folder, const OnProgress& on_progress) {
  ProgressMeter meter(on_progress);
  meter.expect(kPasses * source.bytes);
  const Survey found = survey(source, val_fraction, meter);
  TokenIndex index{.tokenizer = tokenizer.name(),
                   .vocab_size = tokenizer.vocab_size(),
                   .source = source.path,
                   .source_files = static_cast<int64_t>(source.files.size()),
                   .source_bytes = source.bytes,
                   .not_utf8_files = found.not_utf8_files,
                   .first_not_utf8 = found.first_not_utf8,
                   .val_fraction = val_fraction,
                   .splits = write_splits(source, tokenizer, found.held_out, folder, meter)};
  write_index(folder, index);
  return index;
}

}  // namespace trireme::data
