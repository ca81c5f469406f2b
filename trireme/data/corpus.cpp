#include "trireme/data/corpus.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/base/cores.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/data/conversation_packer.h"
#include "trireme/data/index.h"
#include "trireme/data/json_lines.h"
#include "trireme/data/lock.h"
#include "trireme/data/packer.h"
#include "trireme/data/posix.h"
#include "trireme/data/shard.h"
#include "trireme/data/source.h"
#include "trireme/data/tokenizer.h"
#include "trireme/text/chat_template_file.h"

namespace trireme::data {
namespace {

constexpr uint64_t kFormatVersion = 4;  // of what pack() writes: a new one makes every cached corpus stale
constexpr const char* kUnfinished = ".tmp";
constexpr const char* kLock = ".lock";
constexpr double kLockTimeoutSeconds = 300.0;  // without a sign of life of the process that prepares

void check_options(const CorpusOptions& options) {
  if (!(options.val_fraction >= 0.0 && options.val_fraction < 1.0)) {
    throw ConfigError("[data.corpus] data.val_fraction={} is outside [0, 1); 0.02 is usual",
                      options.val_fraction);
  }
  if (options.path == "builtin" && options.builtin_root.empty()) {
    throw ConfigError(
        "[data.corpus] data.path=builtin means the C++ headers of libtorch, but there are none here; set "
        "data.path to a text file or folder");
  }
  TRIREME_CHECK(!options.cache_dir.empty(), "[data.corpus] cache_dir is empty");
}

/// Hash of fields that may not run into each other.
class KeyHash {
 public:
  void add(const void* data, size_t size) {
    const uint64_t length = size;
    hash_.update(&length, sizeof length);
    hash_.update(data, size);
  }
  void add(std::string_view text) { add(text.data(), text.size()); }
  template <typename Number>
  void add_number(Number value) {
    add(&value, sizeof value);
  }
  std::string hex() const { return hex64(hash_.digest()); }

 private:
  StreamingHash hash_;
};

/// A hash of everything that the tokens depend on. Edits show in size and time of a file.
std::string cache_key(const Source& source, const Tokenizer& tokenizer, const ConversationFormat& format,
                      const CorpusOptions& options) {
  const double val_fraction = options.val_fraction;
  KeyHash key;
  key.add_number(kFormatVersion);
  key.add(tokenizer.digest());
  key.add_number(val_fraction);
  if (options.format != plan::DataFormat::kText) {
    key.add(fmt::format("{} {} {}{}", options.format, options.loss_on, options.seq_len,
                        options.keep_apart ? " with begins" : ""));
    key.add(format.chat ? format.chat->digest() : "");
  }
  key.add(source.path);
  const auto is_read_by_line = [](const SourceFile& file) { return is_json_lines(file.name); };
  if (std::ranges::any_of(source.files, is_read_by_line)) key.add(source.field);
  for (const SourceFile& file : source.files) {
    key.add(file.name);
    key.add_number(file.bytes);
    key.add_number(file.mtime_ns);
  }
  return key.hex();
}

void check_sizes(const std::string& folder, const TokenIndex& index) {
  const int64_t token_bytes = bytes_per_token(index.stored_values());
  for (const auto& [name, split] : index.splits) {
    for (const ShardEntry& shard : split.shards) {
      const std::string path = folder + "/" + shard.file;
      struct stat info {};
      const int64_t found = ::stat(path.c_str(), &info) == 0 ? info.st_size : 0;
      const int64_t expected = shard_file_bytes(shard, token_bytes);
      if (found != expected)
        throw DataError("[data.corpus] {}: expected {} bytes, found {}", path, expected, found);
    }
  }
}

/// The index of a prepared folder whose files have the right sizes. A damaged folder counts as none.
std::optional<TokenIndex> find_prepared(const std::string& folder) {
  std::error_code ignored;
  if (!std::filesystem::exists(folder, ignored)) return std::nullopt;
  try {
    const TokenIndex index = read_index(folder);
    check_sizes(folder, index);
    return index;
  } catch (const DataError& error) {
    log_warning("{}; preparing it again", error.what());
    return std::nullopt;
  }
}

/// Folders in `cache` that are being prepared, or whose preparation was cut off.
std::vector<std::filesystem::path> unfinished_in(const std::string& cache) {
  std::vector<std::filesystem::path> folders;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(cache, ignored)) {
    if (entry.path().extension() == kUnfinished) folders.push_back(entry.path());
  }
  return folders;
}

/// Removes what processes that were killed left half done in `cache`, of whatever corpus.
void remove_abandoned(const std::string& cache) {
  for (std::filesystem::path folder : unfinished_in(cache)) {
    const std::string unfinished = folder.string();
    try {
      // The name keeps the lock until the folder is gone: whoever takes it then may make the folder anew.
      if (const auto lock = FileLock::try_take(folder.replace_extension(kLock).string()))
        remove_folder(unfinished);
    } catch (const EnvironmentError& error) {
      log_warning("{}; {} is left in place", error.what(), unfinished);  // perhaps another user's
    }
  }
}

/// Holds the lock of `folder`.
TokenIndex prepare(const Source& source, const Tokenizer& tokenizer, const ConversationFormat& format,
                   const CorpusOptions& options, const std::string& folder, FileLock& lock) {
  TemporaryFolder temporary(folder + kUnfinished);
  const auto tell = [&](const Progress& progress) {
    lock.show_life();
    if (options.on_progress) options.on_progress(progress);
  };
  const PackOptions packing{.val_fraction = options.val_fraction,
                            .folder = temporary.path(),
                            .threads = options.threads > 0 ? options.threads : usable_cores(),
                            .on_progress = tell};
  TokenIndex index = options.format == plan::DataFormat::kText
                         ? pack(source, tokenizer, packing)
                         : pack_conversations(source, tokenizer, format, options.seq_len, packing);
  temporary.commit(folder);
  return index;
}

/// The index in `folder`, once this process, or another one that was first, has prepared it.
TokenIndex prepare_or_wait(const Source& source, const Tokenizer& tokenizer, const ConversationFormat& format,
                           const CorpusOptions& options, const std::string& folder, bool& from_cache) {
  const std::string cache = std::filesystem::path(folder).parent_path().string();
  make_directories(cache);
  ProgressMeter waiting(options.on_progress);
  FileLock lock(folder + kLock, kLockTimeoutSeconds,
                [&](bool alive) { alive ? waiting.beat() : waiting.tell(); });
  const std::optional<TokenIndex> index = find_prepared(folder);
  from_cache = index.has_value();
  if (from_cache) return *index;
  remove_abandoned(cache);
  return prepare(source, tokenizer, format, options, folder, lock);
}

std::string counted(int64_t count, std::string_view noun) {
  return fmt::format("{} {}{}", with_commas(count), noun, count == 1 ? "" : "s");
}

/// "1 file, 200 conversations, 31% of 52,110 tokens count, windows 96% full, byte tokens".
std::string describe_conversations(const TokenIndex& index) {
  const ConversationCounts& counts = *index.conversations;
  const auto percent_of = [](int64_t part, int64_t whole) {
    return fmt::format("{:.0f}%",
                       100.0 * static_cast<double>(part) / static_cast<double>(std::max<int64_t>(1, whole)));
  };
  return fmt::format("{}, {}, {} of {} count, windows {} full, {} tokens",
                     counted(index.source_files, "file"), counted(counts.conversations, "conversation"),
                     percent_of(counts.counted, counts.tokens), counted(counts.tokens, "token"),
                     percent_of(counts.tokens, counts.tokens + counts.padding), index.tokenizer);
}

/// Words on what truncation has taken; empty: nothing.
std::string note_of_cuts(const ConversationCounts& counts) {
  if (counts.cut == 0) return {};
  return fmt::format(
      "{} longer than data.seq_len: {} cut off, {} cut short and {} lost; {} left out, since none of their "
      "answers is "
      "left",
      counted(counts.cut, "conversation") + (counts.cut == 1 ? " is" : " are"),
      counted(counts.cut_tokens, "token"), counted(counts.cut_answers, "answer"),
      with_commas(counts.lost_answers), counted(counts.left_out, "conversation"));
}

std::string describe(const TokenIndex& index) {
  if (index.conversations) return describe_conversations(index);
  std::string text = counted(index.source_files, "file") + ", ";
  if (index.documents() != index.source_files) text += counted(index.documents(), "document") + ", ";
  return fmt::format("{}{}, {} tokens", text, format_bytes(static_cast<double>(index.source_bytes)),
                     index.tokenizer);
}

std::string note_of(const TokenIndex& index, const Tokenizer& tokenizer) {
  if (index.conversations) return note_of_cuts(*index.conversations);
  if (index.not_utf8_files == 0) return {};
  return fmt::format(
      "{} of {} not UTF-8, the first is {}; {}, so data that is no text should not be in data.path",
      with_commas(index.not_utf8_files),
      counted(index.source_files, "file") + (index.not_utf8_files == 1 ? " is" : " are"),
      index.first_not_utf8,
      tokenizer.cuts_anywhere() ? "bytes are used as they are" : "such bytes are read as U+FFFD");
}

void require_one_sequence(const TokenIndex& index, int64_t seq_len) {
  const int64_t tokens = index.splits.at("train").tokens;
  if (tokens > seq_len) return;
  if (index.conversations)
    throw ConfigError(
        "[data.corpus] {} has no conversation to train on: {} were left out, since nothing of their "
        "answers is within data.seq_len={}; raise that, or use other data",
        index.source, index.conversations->left_out, seq_len);
  throw ConfigError(
      "[data.corpus] {} ({}) gives {} training tokens, but one sequence needs {} (data.seq_len={} plus one "
      "to predict); use a longer text, a smaller data.seq_len or a smaller data.val_fraction",
      index.source, describe(index), tokens, seq_len + 1, seq_len);
}

ConversationFormat format_of(const CorpusOptions& options) {
  ConversationFormat format{
      .format = options.format, .loss_on = options.loss_on, .chat = {}, .keeps_apart = options.keep_apart};
  if (options.format == plan::DataFormat::kChat)
    format.chat = std::make_shared<const text::ChatTemplate>(
        text::load_chat_template(options.chat_template, options.tokenizer));
  return format;
}

}  // namespace

PreparedCorpus prepare_corpus(const CorpusOptions& options) {
  check_options(options);
  const std::shared_ptr<const Tokenizer> tokenizer = make_tokenizer(options.tokenizer);
  const Source source =
      list_source(options.path == "builtin" ? options.builtin_root : options.path, options.on_progress);
  const ConversationFormat format = format_of(options);
  const std::string folder = options.cache_dir + "/data/" + cache_key(source, *tokenizer, format, options);
  std::optional<TokenIndex> index = find_prepared(folder);
  bool from_cache = index.has_value();
  if (!from_cache) index = prepare_or_wait(source, *tokenizer, format, options, folder, from_cache);
  require_one_sequence(*index, options.seq_len);
  return {.folder = folder,
          .description = describe(*index),
          .train_tokens = index->splits.at("train").tokens,
          .val_tokens = index->splits.at("val").tokens,
          .vocab_size = index->vocab_size,
          .tokenizer = tokenizer,
          .from_cache = from_cache,
          .note = note_of(*index, *tokenizer)};
}

}  // namespace trireme::data
