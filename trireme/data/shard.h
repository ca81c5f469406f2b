#pragma once
// Token shards on disk: a header of 64 bytes, the tokens (uint16 or uint32, little-endian), zeros up to a
// multiple of 8 bytes, then XXH3-64 of each chunk of tokens.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trireme/base/random_access_file.h"
#include "trireme/data/index.h"

namespace trireme::data {

struct ShardHeader {
  char magic[8];
  uint32_t version;
  uint32_t token_bytes;
  uint64_t tokens;
  uint64_t chunk_tokens;
  uint64_t reserved[3];
  uint64_t checksum;  ///< XXH3-64 of the bytes before it
};
static_assert(sizeof(ShardHeader) == 64);

/// How one split is written.
struct SplitFormat {
  int64_t vocab_size = 0;
  int64_t chunk_tokens = int64_t{1} << 20;
  int64_t shard_tokens = int64_t{64} << 20;  ///< a multiple of chunk_tokens
};

/// Size in bytes of a shard file.
int64_t shard_file_bytes(const ShardEntry& shard, int64_t token_bytes);

/// Writes <split>-00000.tokens, <split>-00001.tokens, ... into a folder, with one chunk in memory. Throws
/// EnvironmentError when a write fails.
class SplitWriter {
 public:
  SplitWriter(std::string folder, std::string split, const SplitFormat& format);
  /// Throws DataError for a token outside the vocabulary.
  void append(std::span<const int32_t> tokens);
  /// Completes and syncs the last shard. Call once, last. `documents` is left to the caller.
  SplitEntry finish();

 private:
  void open_shard();
  void write_chunk();
  void close_shard();
  int64_t room_in_chunk() const;

  std::string folder_, split_;
  SplitFormat format_;
  int64_t token_bytes_;
  SplitEntry entry_;
  Descriptor file_;
  std::string path_;
  int64_t shard_tokens_ = 0;         ///< in chunks already written to the open shard
  std::vector<std::byte> chunk_;     ///< tokens that wait for their chunk to fill
  std::vector<uint64_t> checksums_;  ///< of the open shard
};

/// One shard, read piece by piece: pages of a mapped one would count as the memory of each rank, and a file
/// that becomes shorter would end it. Thread-safe.
class TokenShard {
 public:
  /// Throws DataError when the file is missing, truncated, of another version or not what the index says.
  TokenShard(const std::string& path, const ShardEntry& entry, int64_t token_bytes);
  int64_t tokens() const { return tokens_; }
  /// XXH3-64 of the checksums of its chunks: equal shards have equal ones.
  uint64_t digest() const;
  /// Copies tokens [begin, begin + out.size()). Throws DataError naming file and chunk when a checksum fails.
  void read(int64_t begin, std::span<int64_t> out) const;

 private:
  int64_t token_offset(int64_t token) const;
  /// Checks the header against the index; returns its chunk size.
  int64_t read_chunk_tokens(const ShardEntry& entry) const;
  void verify(int64_t chunk) const;

  RandomAccessFile file_;
  int64_t tokens_;
  int64_t token_bytes_;
  int64_t chunks_;
  int64_t chunk_tokens_ = 0;
  std::vector<uint64_t> checksums_;                ///< by chunk
  std::unique_ptr<std::atomic<bool>[]> verified_;  ///< by chunk
};

}  // namespace trireme::data
