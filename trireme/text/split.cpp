#include "trireme/text/split.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

struct Cut {
  Span span;
  bool is_match;
};

void find_text(std::string_view wanted, std::string_view text, std::vector<Span>& matches) {
  if (wanted.empty()) return;
  for (size_t at = text.find(wanted); at != std::string_view::npos;
       at = text.find(wanted, at + wanted.size())) {
    matches.push_back({at, at + wanted.size()});
  }
}

void find_characters(IsDelimiter is_delimiter, std::string_view text, std::vector<Span>& matches) {
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (is_delimiter(point.value)) matches.push_back({i, i + point.length});
    i += point.length;
  }
}

/// Matches and what is between them, so that the cuts cover `text`.
std::vector<Cut> cover(std::string_view text, const std::vector<Span>& matches, bool invert) {
  std::vector<Cut> cuts;
  cuts.reserve(2 * matches.size() + 1);
  size_t end = 0;
  for (const Span& match : matches) {
    if (end != match.begin) cuts.push_back({{end, match.begin}, invert});
    cuts.push_back({match, !invert});
    end = match.end;
  }
  if (end != text.size()) cuts.push_back({{end, text.size()}, invert});
  return cuts;
}

/// Whether `cut` belongs to the piece that the cut before it, in the direction of merging, is in.
bool joins(SplitBehavior behavior, bool is_match, bool previous_is_match) {
  if (behavior == SplitBehavior::kContiguous) return is_match == previous_is_match;
  return is_match && !previous_is_match;
}

std::vector<Span> merge(std::vector<Cut> cuts, SplitBehavior behavior) {
  const bool backwards = behavior == SplitBehavior::kMergedWithNext;
  if (backwards) std::reverse(cuts.begin(), cuts.end());
  std::vector<Span> merged;
  bool previous = false;
  for (const auto& [span, is_match] : cuts) {
    if (!merged.empty() && joins(behavior, is_match, previous)) {
      merged.back() = {std::min(merged.back().begin, span.begin), std::max(merged.back().end, span.end)};
    } else {
      merged.push_back(span);
    }
    previous = is_match;
  }
  if (backwards) std::reverse(merged.begin(), merged.end());
  return merged;
}

std::vector<Span> arrange(std::vector<Cut> cuts, SplitBehavior behavior) {
  const bool merges = behavior != SplitBehavior::kRemoved && behavior != SplitBehavior::kIsolated;
  if (merges) return merge(std::move(cuts), behavior);
  std::vector<Span> spans;
  spans.reserve(cuts.size());
  for (const Cut& cut : cuts) {
    if (behavior == SplitBehavior::kIsolated || !cut.is_match) spans.push_back(cut.span);
  }
  return spans;
}

}  // namespace

void find_all(const Pattern& pattern, std::string_view text, std::vector<Span>& matches) {
  if (const auto* wanted = std::get_if<std::string>(&pattern)) {
    find_text(*wanted, text, matches);
  } else if (const auto* regex = std::get_if<Regex>(&pattern)) {
    regex->find_all(text, matches);
  } else {
    find_characters(std::get<IsDelimiter>(pattern), text, matches);
  }
}

void split(const Pattern& pattern, SplitBehavior behavior, bool invert, std::string_view text, size_t offset,
           std::vector<Span>& pieces) {
  std::vector<Span> matches;
  matches.reserve(text.size() / 4);
  find_all(pattern, text, matches);
  for (const Span& span : arrange(cover(text, matches, invert), behavior)) {
    if (span.size() != 0) pieces.push_back({offset + span.begin, offset + span.end});
  }
}

std::string replace_all(std::string_view text, const Pattern& pattern, std::string_view content) {
  std::vector<Span> matches;
  find_all(pattern, text, matches);
  std::string replaced;
  size_t end = 0;
  for (const Span& match : matches) {
    replaced += text.substr(end, match.begin - end);
    replaced += content;
    end = match.end;
  }
  replaced += text.substr(end);
  return replaced;
}

}  // namespace trireme::text
