#include "trireme/data/conversation_packer.h"

#include <map>

#include "trireme/base/error.h"
#include "trireme/data/encode_ahead.h"
#include "trireme/data/held_out.h"
#include "trireme/data/json_lines.h"
#include "trireme/data/window_packer.h"

namespace trireme::data {
namespace {

constexpr int64_t kPassesOverRecords = 2;  // one chooses what is held out, one packs

/// Calls body(line, index, reader) for each record of a file.
template <typename Body>
void for_each_record(const Source& source, const SourceFile& file, ProgressMeter& meter, Body body) {
  const std::string path = source.path_of(file);
  if (!is_json_lines(file.name))
    throw ConfigError(
        "[data.conversation] {} is no JSON Lines file (*.jsonl, *.jsonl.gz, *.jsonl.zst), which "
        "data.format=answers "
        "and chat read; take it out of the folder, or set data.format=text",
        path);
  JsonLines reader(path, "", [&meter] { meter.beat(); });
  for (size_t index = 0; const auto line = reader.next_record(); ++index) {
    body(*line, index, reader);
    meter.beat();
  }
  meter.add(file.bytes);
}

HeldOut choose_held_out(const Source& source, double val_fraction, ProgressMeter& meter) {
  HeldOutChooser chooser(val_fraction);
  for (const SourceFile& file : source.files) {
    for_each_record(source, file, meter, [&](std::string_view line, size_t index, const JsonLines&) {
      chooser.add(held_out_draw(file.name, index), static_cast<int64_t>(line.size()));
    });
  }
  return chooser.choose();
}

class SplitOfConversations {
 public:
  SplitOfConversations(const Tokenizer& tokenizer, const std::string& folder, const std::string& split,
                       int64_t seq_len, int64_t kinds)
      : writer_(folder, split, {.vocab_size = kinds * tokenizer.vocab_size()}),
        packer_(writer_, {.seq_len = seq_len,
                          .vocab_size = static_cast<int32_t>(tokenizer.vocab_size()),
                          .filler = tokenizer.document_separator(),
                          .marks_begins = kinds == kKindsWithBegins}) {}

  void add(std::span<const int32_t> tokens) { packer_.add(tokens); }
  const ConversationCounts& counts() const { return packer_.counts(); }
  SplitEntry finish() {
    packer_.finish();
    SplitEntry entry = writer_.finish();
    entry.documents = counts().conversations;
    return entry;
  }

 private:
  SplitWriter writer_;
  WindowPacker packer_;
};

}  // namespace

TokenIndex pack_conversations(const Source& source, const Tokenizer& tokenizer,
                              const ConversationFormat& format, int64_t seq_len, const PackOptions& options) {
  if (!source.field.empty())
    throw ConfigError(
        "[data.conversation] '#{}' names a field of text, but conversations have fields of their own; "
        "leave it out of data.path",
        source.field);
  ProgressMeter meter(options.on_progress);
  meter.expect(kPassesOverRecords * source.bytes);
  HeldOut held_out = choose_held_out(source, options.val_fraction, meter);
  const int64_t kinds = format.keeps_apart ? kKindsWithBegins : kCountedKinds;
  SplitOfConversations train(tokenizer, options.folder, "train", seq_len, kinds),
      val(tokenizer, options.folder, "val", seq_len, kinds);
  EncodeAhead encode(
      tokenizer, options.threads, [&meter] { meter.beat(); }, encode_marked);
  for (const SourceFile& file : source.files) {
    for_each_record(source, file, meter, [&](std::string_view line, size_t index, const JsonLines& reader) {
      const auto size = static_cast<int64_t>(line.size());
      // A conversation is in one split, that of most of its bytes.
      const bool is_held_out = 2 * held_out.take(held_out_draw(file.name, index), size) > size;
      const std::string place = fmt::format("{}, line {}", source.path_of(file), reader.line());
      SplitOfConversations& split = is_held_out ? val : train;
      encode.add(marked_text(format, line, place).text, [&split](auto tokens) { split.add(tokens); });
    });
  }
  encode.finish();
  const SplitEntry train_entry = train.finish(), val_entry = val.finish();
  ConversationCounts counts = train.counts();
  counts += val.counts();
  TokenIndex index{.tokenizer = tokenizer.name(),
                   .vocab_size = tokenizer.vocab_size(),
                   .source = source.path,
                   .source_files = static_cast<int64_t>(source.files.size()),
                   .source_bytes = source.bytes,
                   .val_fraction = options.val_fraction,
                   .conversations = counts,
                   .kinds = kinds,
                   .splits = {{"train", train_entry}, {"val", val_entry}}};
  write_index(options.folder, index);
  return index;
}

}  // namespace trireme::data
