#pragma once
// index.json of a folder of token shards: which files belong to which split, how many tokens they hold, and
// where they came from. Written last, so a folder with an index is whole.
#include <cstdint>
#include <map>
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

struct TokenIndex {
  std::string tokenizer;
  int64_t vocab_size = 0;
  std::string source;  ///< path of the text
  int64_t source_files = 0;
  int64_t source_bytes = 0;
  int64_t not_utf8_files = 0;
  std::string first_not_utf8 = {};  ///< path of the first of them
  double val_fraction = 0.0;
  std::map<std::string, SplitEntry> splits;  ///< "train" and "val"
  int64_t documents() const;
};

/// Bytes of a token on disk: 2 for vocabularies up to 65536, else 4.
int64_t bytes_per_token(int64_t vocab_size);

/// Writes folder/index.json and syncs it. Throws EnvironmentError.
void write_index(const std::string& folder, const TokenIndex& index);

/// Throws DataError naming the file when it is missing, of another schema or makes no sense.
TokenIndex read_index(const std::string& folder);

}  // namespace trireme::data
