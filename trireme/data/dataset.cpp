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
  const int64_t token_bytes = bytes_per_token(index.stored_values());
  vocab_size_ = index.vocab_size;
  marked_ = index.conversations.has_value();
  marks_begins_ = marked_ && index.kinds == kKindsWithBegins;
  stored_values_ = index.stored_values();
  for (const ShardEntry& entry : find_split(index, folder, split).shards) {
    shards_.push_back(std::make_unique<TokenShard>(folder + "/" + entry.file, entry, token_bytes));
    tokens_ += entry.tokens;
  }
  samples_ = tokens_ > seq_len ? (tokens_ - 1) / seq_len : 0;
  if (!marked_) return;
  kept_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(samples_));
  for (auto& count : kept_) count.store(-1, std::memory_order_relaxed);
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

/// Beyond the vocabulary where the shard is damaged.
int64_t Dataset::id_of(int64_t stored) const {
  const bool is_of_a_kind = marked_ && stored >= 0 && stored < stored_values_;
  return is_of_a_kind ? stored % vocab_size_ : stored;
}

void Dataset::read(int64_t index, std::span<int64_t> tokens) const {
  read_stored(index, tokens);
  for (int64_t& token : tokens) token = id_of(token);
  check_ids(index, tokens);
}

void Dataset::read_targets(int64_t index, std::span<int64_t> tokens, std::span<int64_t> targets) const {
  read_stored(index, tokens);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool counted = counts(tokens[i]);
    tokens[i] = id_of(tokens[i]);
    if (i > 0) targets[i - 1] = counted ? tokens[i] : kIgnoredTarget;
  }
  check_ids(index, tokens);
}

std::optional<std::vector<int64_t>> Dataset::document_begins(int64_t index) const {
  if (!marks_begins_) return std::nullopt;
  std::vector<int64_t> tokens(static_cast<size_t>(seq_len_) + 1), found;
  read_stored(index, tokens);
  for (int64_t i = 1; i < seq_len_; ++i) {
    if (begins(tokens[static_cast<size_t>(i)])) found.push_back(i);
  }
  return found;
}

int64_t Dataset::kept_targets(int64_t index) const {
  if (!marked_) return seq_len_;
  std::atomic<int32_t>& known = kept_.at(static_cast<size_t>(index));
  if (const int32_t count = known.load(std::memory_order_relaxed); count >= 0) return count;
  std::vector<int64_t> tokens(static_cast<size_t>(seq_len_) + 1);
  read_stored(index, tokens);
  const auto count =
      std::count_if(tokens.begin() + 1, tokens.end(), [this](int64_t token) { return counts(token); });
  known.store(static_cast<int32_t>(count), std::memory_order_relaxed);
  return count;
}

void Dataset::read_stored(int64_t index, std::span<int64_t> tokens) const {
  TRIREME_CHECK(index >= 0 && index < samples_, "[data.dataset] there is no sample {} among {}", index,
                samples_);
  TRIREME_CHECK(static_cast<int64_t>(tokens.size()) == seq_len_ + 1,
                "[data.dataset] the buffer has {} tokens, but must have seq_len + 1 with seq_len={}",
                tokens.size(), seq_len_);
  read_tokens(index * seq_len_, tokens);
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
