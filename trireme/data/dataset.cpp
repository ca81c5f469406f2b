#include "trireme/data/dataset.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/data/index.h"
#include "trireme/data/shard.h"

namespace trireme::data {
namespace {

const SplitEntry& find_split(const TokenIndex& index, const std::string& folder, const std::string& split) {
  const auto found = index.splits.find(split);
  if (found == index.splits.end()) {
    throw DataError("[data.dataset] {} has no split '{}'; the splits are 'train' and 'val'", folder, split);
  }
  return found->second;
}

}  // namespace

Dataset::Dataset(const std::string& folder, const std::string& split, int64_t seq_len)
    : folder_(folder), seq_len_(seq_len) {
  TRIREME_CHECK(seq_len >= 1, "[data.dataset] seq_len={} must be at least 1", seq_len);
  const TokenIndex index = read_index(folder);
  const int64_t token_bytes = bytes_per_token(index.vocab_size);
  vocab_size_ = index.vocab_size;
  for (const ShardEntry& entry : find_split(index, folder, split).shards) {
    shards_.push_back(std::make_unique<TokenShard>(folder + "/" + entry.file, entry, token_bytes));
    tokens_ += entry.tokens;
  }
  samples_ = tokens_ > seq_len ? (tokens_ - 1) / seq_len : 0;
}

Dataset::~Dataset() = default;

uint64_t Dataset::digest() const {
  StreamingHash hash;
  for (const auto& shard : shards_) {
    const uint64_t part = shard->digest();
    hash.update(&part, sizeof part);
  }
  return hash.digest();
}

void Dataset::check_ids(int64_t index, std::span<const int64_t> tokens) const {
  const auto beyond =
      std::ranges::find_if(tokens, [this](int64_t id) { return id < 0 || id >= vocab_size_; });
  if (beyond == tokens.end()) return;
  throw DataError(
      "[data.dataset] {}: token {} of sample {} is outside the vocabulary of {} in its index.json; delete "
      "the folder and prepare the data again",
      folder_, *beyond, index, vocab_size_);
}

void Dataset::read(int64_t index, std::span<int64_t> tokens) const {
  TRIREME_CHECK(index >= 0 && index < samples_, "[data.dataset] there is no sample {} among {}", index,
                samples_);
  TRIREME_CHECK(static_cast<int64_t>(tokens.size()) == seq_len_ + 1,
                "[data.dataset] the buffer has {} tokens, but must have seq_len + 1 with seq_len={}",
                tokens.size(), seq_len_);
  read_tokens(index * seq_len_, tokens);
  check_ids(index, tokens);
}

void Dataset::read_tokens(int64_t begin, std::span<int64_t> tokens) const {
  for (const auto& shard : shards_) {
    if (begin < shard->tokens()) {
      const size_t count = std::min(tokens.size(), static_cast<size_t>(shard->tokens() - begin));
      shard->read(begin, tokens.first(count));
      tokens = tokens.subspan(count);
      if (tokens.empty()) return;
      begin = 0;
    } else {
      begin -= shard->tokens();
    }
  }
}

}  // namespace trireme::data
