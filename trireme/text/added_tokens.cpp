#include "trireme/text/added_tokens.h"

#include <algorithm>

#include "trireme/base/utf8.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

/// The code point before `position`, which is not 0.
CodePoint code_point_before(std::string_view text, size_t position) {
  return code_point_at(text, character_begin(text, position - 1));
}

bool is_inside_word(std::string_view text, Span span) {
  const bool after_word = span.begin > 0 && is_word_character(code_point_before(text, span.begin).value);
  return after_word || (span.end < text.size() && is_word_character(code_point_at(text, span.end).value));
}

size_t skip_spaces_back(std::string_view text, size_t begin) {
  while (begin > 0) {
    const CodePoint point = code_point_before(text, begin);
    if (!is_space(point.value)) break;
    begin -= point.length;
  }
  return begin;
}

size_t skip_spaces(std::string_view text, size_t end) {
  while (end < text.size()) {
    const CodePoint point = code_point_at(text, end);
    if (!is_space(point.value)) break;
    end += point.length;
  }
  return end;
}

}  // namespace

void TokenFinder::add(const AddedToken& token, std::string_view spelling) {
  if (spelling.empty()) return;
  trie_.insert(spelling, static_cast<int32_t>(tokens_.size()));
  tokens_.push_back(token);
  is_first_[static_cast<unsigned char>(spelling[0])] = true;
}

std::optional<TokenFinder::Found> TokenFinder::next(std::string_view text, size_t begin) const {
  for (size_t i = begin; i < text.size(); ++i) {
    if (!is_first_[static_cast<unsigned char>(text[i])]) continue;
    std::optional<Found> longest;
    trie_.prefixes(text.substr(i), [&](size_t length, int32_t place) {
      longest = {{i, i + length}, &tokens_[static_cast<size_t>(place)]};
    });
    if (longest) return longest;
  }
  return std::nullopt;
}

std::vector<Part> TokenFinder::split(std::string_view text) const {
  std::vector<Part> parts;
  size_t done = 0;
  for (size_t begin = 0; !tokens_.empty();) {
    const auto found = next(text, begin);
    if (!found) break;
    begin = found->span.end;  // the search goes on here, even where the token then takes spaces after it
    if (found->token->single_word && is_inside_word(text, found->span)) continue;
    Span span = found->span;
    if (found->token->lstrip) span.begin = std::max(skip_spaces_back(text, span.begin), done);
    if (found->token->rstrip) span.end = skip_spaces(text, span.end);
    if (done < span.begin) parts.push_back({{done, span.begin}, std::nullopt});
    parts.push_back({span, found->token->id});
    done = span.end;
  }
  if (done < text.size()) parts.push_back({{done, text.size()}, std::nullopt});
  return parts;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens, const Normalizer& normalizer) {
  // Where two tokens look alike, the special one counts.
  std::stable_partition(tokens.begin(), tokens.end(), [](const AddedToken& token) { return token.special; });
  for (const AddedToken& token : tokens) {
    if (!token.in_text) {
      // It has an id and a content, and that is all.
    } else if (token.normalized) {
      normalized_.add(token, normalize(normalizer, token.content));
    } else {
      raw_.add(token, token.content);
    }
    contents_.emplace(token.id, token.content);
    if (token.special) special_.insert(token.content);
  }
}

std::optional<std::string_view> AddedTokens::content(int32_t id) const {
  const auto found = contents_.find(id);
  if (found == contents_.end()) return std::nullopt;
  return found->second;
}

std::optional<int32_t> AddedTokens::find(std::string_view content) const {
  for (const auto& [id, own] : contents_) {
    if (own == content) return id;
  }
  return std::nullopt;
}

int64_t AddedTokens::id_end() const {
  int64_t end = 0;
  for (const auto& [id, content] : contents_) end = std::max<int64_t>(end, int64_t{id} + 1);
  return end;
}

}  // namespace trireme::text
