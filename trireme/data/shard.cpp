#include "trireme/data/shard.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/base/round_up.h"
#include "trireme/data/posix.h"

namespace trireme::data {
namespace {

static_assert(std::endian::native == std::endian::little,
              "token shards are little-endian and read as they are");

constexpr std::array<char, 8> kMagic = {'T', 'R', 'I', 'T', 'O', 'K', 'E', 'N'};
constexpr uint32_t kVersion = 1;
constexpr int64_t kHeaderBytes = sizeof(ShardHeader);

int64_t checksums_offset(int64_t tokens, int64_t token_bytes) {
  return kHeaderBytes + round_up(tokens * token_bytes, int64_t{sizeof(uint64_t)});
}

uint64_t header_checksum(const ShardHeader& header) {
  return xxh3(&header, offsetof(ShardHeader, checksum));
}

ShardHeader make_header(int64_t tokens, int64_t token_bytes, int64_t chunk_tokens) {
  ShardHeader header{};
  std::ranges::copy(kMagic, header.magic);
  header.version = kVersion;
  header.token_bytes = static_cast<uint32_t>(token_bytes);
  header.tokens = static_cast<uint64_t>(tokens);
  header.chunk_tokens = static_cast<uint64_t>(chunk_tokens);
  header.checksum = header_checksum(header);
  return header;
}

/// Stores the tokens as Stored; returns the position of the first one outside the vocabulary, or -1.
template <typename Stored>
int64_t narrow(std::span<const int32_t> tokens, int64_t vocab_size, std::byte* out) {
  bool outside = false;
  for (size_t i = 0; i < tokens.size(); ++i) {
    outside |= static_cast<uint32_t>(tokens[i]) >= static_cast<uint64_t>(vocab_size);
    const auto stored = static_cast<Stored>(tokens[i]);
    std::memcpy(out + i * sizeof(Stored), &stored, sizeof stored);
  }
  if (!outside) return -1;
  const auto beyond = [&](int32_t token) { return token < 0 || token >= vocab_size; };
  return std::ranges::find_if(tokens, beyond) - tokens.begin();
}

template <typename Stored>
void widen(const std::byte* stored, std::span<int64_t> out) {
  for (size_t i = 0; i < out.size(); ++i) {
    Stored token;
    std::memcpy(&token, stored + i * sizeof(Stored), sizeof token);
    out[i] = static_cast<int64_t>(token);
  }
}

/// A cache without one of its files is damaged.
RandomAccessFile open_shard_file(const std::string& path) {
  if (std::filesystem::exists(path)) return RandomAccessFile(path);
  throw DataError("[data.shard] {} does not exist; delete its folder and prepare the data again", path);
}

[[noreturn]] void damaged(const std::string& path, std::string_view reason) {
  throw DataError("[data.shard] {}: {}; delete its folder and prepare the data again", path, reason);
}

}  // namespace

int64_t shard_file_bytes(const ShardEntry& shard, int64_t token_bytes) {
  return checksums_offset(shard.tokens, token_bytes) + shard.chunks * int64_t{sizeof(uint64_t)};
}

SplitWriter::SplitWriter(std::string folder, std::string split, const SplitFormat& format)
    : folder_(std::move(folder)),
      split_(std::move(split)),
      format_(format),
      token_bytes_(bytes_per_token(format.vocab_size)) {
  TRIREME_CHECK(format.vocab_size >= 1 && format.chunk_tokens >= 1 &&
                    format.shard_tokens >= format.chunk_tokens &&
                    format.shard_tokens % format.chunk_tokens == 0,
                "[data.shard] vocab_size={}, chunk_tokens={} and shard_tokens={} must be at least 1, and "
                "shard_tokens a multiple of chunk_tokens",
                format.vocab_size, format.chunk_tokens, format.shard_tokens);
}

int64_t SplitWriter::room_in_chunk() const {
  return format_.chunk_tokens - static_cast<int64_t>(chunk_.size()) / token_bytes_;
}

void SplitWriter::append(std::span<const int32_t> tokens) {
  while (!tokens.empty()) {
    const size_t count = std::min(tokens.size(), static_cast<size_t>(room_in_chunk()));
    const size_t used = chunk_.size();
    chunk_.resize(used + count * static_cast<size_t>(token_bytes_));
    const auto convert = token_bytes_ == 2 ? narrow<uint16_t> : narrow<uint32_t>;
    const int64_t outside = convert(tokens.first(count), format_.vocab_size, chunk_.data() + used);
    if (outside >= 0) {
      throw DataError(
          "[data.shard] token {} is outside the vocabulary of {}; the tokenizer and its vocabulary do not "
          "match",
          tokens[static_cast<size_t>(outside)], format_.vocab_size);
    }
    tokens = tokens.subspan(count);
    if (room_in_chunk() == 0) write_chunk();
  }
}

void SplitWriter::open_shard() {
  const std::string name = fmt::format("{}-{:05}.tokens", split_, entry_.shards.size());
  path_ = folder_ + "/" + name;
  file_ = Descriptor(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file_) throw_errno("create", path_, errno);
  entry_.shards.push_back({.file = name});
  const ShardHeader blank{};
  write_all(file_.get(), &blank, sizeof blank, path_);
}

void SplitWriter::write_chunk() {
  if (!file_) open_shard();
  write_all(file_.get(), chunk_.data(), chunk_.size(), path_);
  checksums_.push_back(xxh3(chunk_.data(), chunk_.size()));
  shard_tokens_ += static_cast<int64_t>(chunk_.size()) / token_bytes_;
  chunk_.clear();
  if (shard_tokens_ == format_.shard_tokens) close_shard();
}

void SplitWriter::close_shard() {
  const int64_t end = kHeaderBytes + shard_tokens_ * token_bytes_;
  const std::array<std::byte, sizeof(uint64_t)> zeros{};
  write_all(file_.get(), zeros.data(),
            static_cast<size_t>(checksums_offset(shard_tokens_, token_bytes_) - end), path_);
  write_all(file_.get(), checksums_.data(), checksums_.size() * sizeof(uint64_t), path_);
  const ShardHeader header = make_header(shard_tokens_, token_bytes_, format_.chunk_tokens);
  if (::pwrite(file_.get(), &header, sizeof header, 0) != kHeaderBytes) throw_errno("write", path_, errno);
  if (::fsync(file_.get()) != 0) throw_errno("sync", path_, errno);
  file_ = Descriptor();
  entry_.shards.back().tokens = shard_tokens_;
  entry_.shards.back().chunks = static_cast<int64_t>(checksums_.size());
  entry_.tokens += shard_tokens_;
  shard_tokens_ = 0;
  checksums_.clear();
}

SplitEntry SplitWriter::finish() {
  if (!chunk_.empty()) write_chunk();
  if (file_) close_shard();
  return entry_;
}

TokenShard::TokenShard(const std::string& path, const ShardEntry& entry, int64_t token_bytes)
    : file_(open_shard_file(path)), tokens_(entry.tokens), token_bytes_(token_bytes), chunks_(entry.chunks) {
  const int64_t found = file_.size(), expected = shard_file_bytes(entry, token_bytes);
  if (found != expected) {
    damaged(path, fmt::format("{}: expected {} bytes, found {}", found < expected ? "truncated" : "too long",
                              expected, found));
  }
  chunk_tokens_ = read_chunk_tokens(entry);
  checksums_.resize(static_cast<size_t>(chunks_));
  file_.read(checksums_offset(tokens_, token_bytes_), std::as_writable_bytes(std::span(checksums_)));
  verified_ = std::make_unique<std::atomic<bool>[]>(static_cast<size_t>(chunks_));
}

int64_t TokenShard::read_chunk_tokens(const ShardEntry& entry) const {
  ShardHeader header;
  file_.read(0, std::as_writable_bytes(std::span(&header, 1)));
  if (!std::ranges::equal(header.magic, kMagic)) damaged(file_.path(), "not a token shard");
  if (header.version != kVersion) {
    damaged(file_.path(), fmt::format("format version {} is not {}", header.version, kVersion));
  }
  if (header.checksum != header_checksum(header))
    damaged(file_.path(), "the header's checksum does not match");
  const auto chunk_tokens = static_cast<int64_t>(header.chunk_tokens);
  const bool agrees = header.tokens == static_cast<uint64_t>(entry.tokens) &&
                      header.token_bytes == static_cast<uint64_t>(token_bytes_) && chunk_tokens >= 1 &&
                      (entry.tokens - 1) / chunk_tokens + 1 == entry.chunks;
  if (!agrees) {
    damaged(file_.path(), fmt::format("the header says {} tokens of {} bytes in chunks of {}, but index.json "
                                      "says {} tokens of {} bytes in {} chunks",
                                      header.tokens, header.token_bytes, header.chunk_tokens, entry.tokens,
                                      token_bytes_, entry.chunks));
  }
  return chunk_tokens;
}

int64_t TokenShard::token_offset(int64_t token) const {
  return kHeaderBytes + token * token_bytes_;
}

void TokenShard::verify(int64_t chunk) const {
  std::atomic<bool>& verified = verified_[static_cast<size_t>(chunk)];
  if (verified.load(std::memory_order_relaxed)) return;
  const int64_t begin = chunk * chunk_tokens_;
  const int64_t count = std::min(chunk_tokens_, tokens_ - begin);
  std::vector<std::byte> bytes(static_cast<size_t>(count * token_bytes_));
  file_.read(token_offset(begin), bytes);
  const uint64_t found = xxh3(bytes.data(), bytes.size()), expected = checksums_[static_cast<size_t>(chunk)];
  if (found != expected) {
    damaged(file_.path(), fmt::format("chunk {} of {} (tokens {} to {}) has checksum {}, expected {}", chunk,
                                      chunks_, begin, begin + count - 1, hex64(found), hex64(expected)));
  }
  verified.store(true, std::memory_order_relaxed);
}

uint64_t TokenShard::digest() const {
  return xxh3(checksums_.data(), checksums_.size() * sizeof(uint64_t));
}

void TokenShard::read(int64_t begin, std::span<int64_t> out) const {
  if (out.empty()) return;
  const int64_t last = begin + static_cast<int64_t>(out.size()) - 1;
  TRIREME_CHECK(begin >= 0 && last < tokens_, "[data.shard] tokens {} to {} are outside its {}", begin, last,
                tokens_);
  for (int64_t chunk = begin / chunk_tokens_; chunk <= last / chunk_tokens_; ++chunk) verify(chunk);
  const auto convert = token_bytes_ == 2 ? widen<uint16_t> : widen<uint32_t>;
  std::vector<std::byte> stored(out.size() * static_cast<size_t>(token_bytes_));
  file_.read(token_offset(begin), stored);
  convert(stored.data(), out);
}

}  // namespace trireme::data
