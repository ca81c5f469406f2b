#include "trireme/data/window_packer.h"

#include <algorithm>

namespace trireme::data {
namespace {

/// Windows that wait for a conversation that fills them.
constexpr size_t kOpenWindows = 32;

}  // namespace

void WindowPacker::add(std::span<const int32_t> tokens) {
  std::vector<int32_t> kept = shortened(tokens);
  if (std::ranges::none_of(kept, [this](int32_t token) { return counts(token); })) {
    ++counts_.left_out;
    return;
  }
  counts_.conversations += 1;
  counts_.tokens += static_cast<int64_t>(kept.size());
  counts_.counted += std::ranges::count_if(kept, [this](int32_t token) { return counts(token); });
  kept[0] += mark_of_begin();
  std::vector<int32_t>& window = window_for(kept.size());
  window.insert(window.end(), kept.begin(), kept.end());
}

/// Nothing predicts the first token of a conversation.
std::vector<int32_t> WindowPacker::shortened(std::span<const int32_t> tokens) {
  const size_t most = static_cast<size_t>(options_.seq_len);
  std::vector<int32_t> kept(tokens.begin(),
                            tokens.begin() + static_cast<std::ptrdiff_t>(std::min(most, tokens.size())));
  if (!kept.empty() && counts(kept[0])) kept[0] -= options_.vocab_size;
  if (tokens.size() > most) count_cut(tokens);
  return kept;
}

void WindowPacker::count_cut(std::span<const int32_t> tokens) {
  const auto most = static_cast<size_t>(options_.seq_len);
  counts_.cut += 1;
  counts_.cut_tokens += static_cast<int64_t>(tokens.size() - most);
  for (size_t i = most; i < tokens.size(); ++i) {
    const bool begins = counts(tokens[i]) && !counts(tokens[i - 1]);
    if (begins) ++counts_.lost_answers;
  }
  if (counts(tokens[most]) && counts(tokens[most - 1])) ++counts_.cut_answers;
}

std::vector<int32_t>& WindowPacker::window_for(size_t tokens) {
  const size_t room_before = static_cast<size_t>(options_.seq_len) - tokens;
  auto best = open_.end(), fullest = open_.begin();
  for (auto each = open_.begin(); each != open_.end(); ++each) {
    if (each->size() <= room_before && (best == open_.end() || each->size() > best->size())) best = each;
    if (each->size() > fullest->size()) fullest = each;
  }
  if (best != open_.end()) return *best;
  if (open_.size() < kOpenWindows) return open_.emplace_back();
  write(std::move(*fullest));
  fullest->clear();
  return *fullest;
}

void WindowPacker::write(std::vector<int32_t> window) {
  const auto length = static_cast<size_t>(options_.seq_len);
  const size_t used = window.size();
  counts_.padding += static_cast<int64_t>(length - used);
  window.resize(length, options_.filler);
  if (used < length) window[used] += mark_of_begin();
  writer_.append(window);
}

void WindowPacker::finish() {
  for (std::vector<int32_t>& window : open_) write(std::move(window));
  // The last target of the last window.
  if (!open_.empty()) writer_.append({&options_.filler, 1});
  open_.clear();
}

}  // namespace trireme::data
