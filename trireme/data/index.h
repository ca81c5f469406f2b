#pragma once
// index.json of a folder of token shards: which files belong to which split, how many tokens they hold, and
// where they came from. Written last, so a folder with an index is whole.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace trireme::data {

struct ShardEntry {
  std::string file;  ///< a plain name inside the folder
  int64_t tokens = 0;
  int64_t chunks = 0;
};

struct SplitEntry {
  int64_t tokens = 0;
  int64_t documents = 0;  ///< that begin in this split
  std::vector<ShardEntry> shards;
};

/// The counts of conversations that were packed into windows.
struct ConversationCounts {
  int64_t conversations = 0, tokens = 0;  ///< that are kept
  int64_t counted = 0;                    ///< tokens of these whose loss counts
  int64_t padding = 0;                    ///< tokens between conversations
  int64_t cut = 0, cut_tokens = 0;  ///< conversations longer than a window, and tokens that were cut off
  int64_t cut_answers = 0, lost_answers = 0;  ///< that lost their end, or all of their tokens
  int64_t left_out = 0;                       ///< conversations that have no answer left
  ConversationCounts& operator+=(const ConversationCounts& other);
};

/// The kinds of tokens that shards of conversations have: those that do not count in the loss, those that do,
/// and, where documents are to be kept apart, those that do not and begin one. A token is stored as its id
/// plus vocab_size times its kind.
inline constexpr int64_t kCountedKinds = 2, kKindsWithBegins = 3;

struct TokenIndex {
  std::string tokenizer;
  int64_t vocab_size = 0;
  std::string source;  ///< path of the text
  int64_t source_files = 0;
  int64_t source_bytes = 0;
  int64_t not_utf8_files = 0;
  std::string first_not_utf8 = {};  ///< path of the first of them
  double val_fraction = 0.0;
  /// Counts of conversations, whose tokens are of kinds.
  std::optional<ConversationCounts> conversations = {};
  int64_t kinds = kCountedKinds;  ///< of the tokens of conversations
  /// One more than the largest number that is stored for a token.
  int64_t stored_values() const { return conversations ? kinds * vocab_size : vocab_size; }
  std::map<std::string, SplitEntry> splits;  ///< "train" and "val"
  int64_t documents() const;
};

/// Bytes of a token on disk: 2 for up to 65536 values, else 4.
int64_t bytes_per_token(int64_t stored_values);

/// Writes folder/index.json and syncs it. Throws EnvironmentError.
void write_index(const std::string& folder, const TokenIndex& index);

/// Throws DataError naming the file when it is missing, of another schema or makes no sense.
TokenIndex read_index(const std::string& folder);

}  // namespace trireme::data
