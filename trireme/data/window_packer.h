#pragma once
// Conversations side by side in windows of one length, so that none begins in one window and ends in the
// next.
#include <cstdint>
#include <span>
#include <vector>

#include "trireme/data/index.h"
#include "trireme/data/shard.h"

namespace trireme::data {

struct WindowOptions {
  int64_t seq_len = 0;
  /// Tokens that count are given as larger ones; of what is written a token is its id, vocab_size more where
  /// it counts, and with marks_begins twice that more where it begins a conversation, or what fills a window.
  int32_t vocab_size = 0;
  int32_t filler = 0;  ///< a token for the rest of a window; it does not count
  bool marks_begins = false;
};

/// The tokens that it writes are read as samples of seq_len + 1 tokens that share one with their neighbour
/// (Dataset), which is the first of a conversation or a filler, and does not count.
class WindowPacker {
 public:
  /// `writer` must outlive this.
  WindowPacker(SplitWriter& writer, const WindowOptions& options) : writer_(writer), options_(options) {}

  /// Puts a conversation into the fullest open window with room for it, a pure function of what came before.
  /// Tokens beyond seq_len are cut off; what has no counted token then is left out.
  void add(std::span<const int32_t> tokens);
  /// Writes what is open. Call once, last.
  void finish();
  const ConversationCounts& counts() const { return counts_; }

 private:
  std::vector<int32_t> shortened(std::span<const int32_t> tokens);
  void count_cut(std::span<const int32_t> tokens);
  std::vector<int32_t>& window_for(size_t tokens);
  void write(std::vector<int32_t> window);
  int32_t mark_of_begin() const { return options_.marks_begins ? 2 * options_.vocab_size : 0; }
  bool counts(int32_t token) const { return token >= options_.vocab_size; }

  SplitWriter& writer_;
  WindowOptions options_;
  std::vector<std::vector<int32_t>> open_;
  ConversationCounts counts_;
};

}  // namespace trireme::data
