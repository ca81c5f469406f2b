#include "trireme/text/pre_tokenizer.h"

#include <algorithm>

#include "trireme/text/byte_level.h"
#include "trireme/text/unicode.h"

namespace trireme::text {

const char* const kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

namespace {

/// The words after `change(word, is_first)`, as one text again.
template <typename Change>
void change_words(Pieces& pieces, Change change) {
  Pieces changed{.text = {}, .words = {}, .starts_input = pieces.starts_input};
  changed.text.reserve(pieces.text.size() * 2);
  changed.words.reserve(pieces.words.size());
  for (const Span& word : pieces.words) {
    const size_t begin = changed.text.size();
    changed.text += change(word.of(pieces.text), pieces.starts_input && word.begin == 0);
    changed.words.push_back({begin, changed.text.size()});
  }
  pieces = std::move(changed);
}

void split_words(Pieces& pieces, const Pattern& pattern, SplitBehavior behavior, bool invert) {
  std::vector<Span> words;
  for (const Span& word : pieces.words)
    split(pattern, behavior, invert, word.of(pieces.text), word.begin, words);
  pieces.words = std::move(words);
}

enum class CharacterClass { kSpace, kWord, kOther };

CharacterClass class_of(uint32_t code) {
  if (is_word_character(code)) return CharacterClass::kWord;
  return is_space(code) ? CharacterClass::kSpace : CharacterClass::kOther;
}

void split_classes(std::string_view text, Span word, std::vector<Span>& runs) {
  auto last = CharacterClass::kSpace;
  for (size_t i = word.begin; i < word.end;) {
    const CodePoint point = code_point_at(text, i);
    const CharacterClass kind = class_of(point.value);
    if (kind != CharacterClass::kSpace) {
      if (kind != last) runs.push_back({i, i});
      runs.back().end = i + point.length;
    }
    last = kind;
    i += point.length;
  }
}

const Pattern& gpt2_pattern() {
  static const Pattern pattern = Regex(kGpt2Pattern);
  return pattern;
}

struct TakeStep {
  Pieces& pieces;

  void operator()(const Split& step) const { split_words(pieces, step.pattern, step.behavior, step.invert); }

  void operator()(const Whitespace&) const {
    std::vector<Span> runs;
    for (const Span& word : pieces.words) split_classes(pieces.text, word, runs);
    pieces.words = std::move(runs);
  }

  void operator()(const ByteLevel& step) const {
    if (step.add_prefix_space) {
      change_words(pieces, [](std::string_view word, bool) {
        return word.starts_with(' ') ? std::string(word) : " " + std::string(word);
      });
    }
    if (step.use_regex) split_words(pieces, gpt2_pattern(), SplitBehavior::kIsolated, false);
    if (step.spells_bytes) {
      change_words(pieces, [](std::string_view word, bool) { return spell_bytes(word); });
    }
  }

  void operator()(const Metaspace& step) const {
    change_words(pieces, [&](std::string_view word, bool is_first) {
      std::string changed = replace_all(word, std::string(" "), step.replacement);
      const bool prepends = step.prepend_scheme == PrependScheme::kAlways ||
                            (step.prepend_scheme == PrependScheme::kFirst && is_first);
      return prepends && !changed.starts_with(step.replacement) ? step.replacement + changed : changed;
    });
    if (step.split) split_words(pieces, step.replacement, SplitBehavior::kMergedWithNext, false);
  }
};

}  // namespace

void pre_tokenize(const PreTokenizer& pre_tokenizer, Pieces& pieces) {
  for (const PreTokenizerStep& step : pre_tokenizer) std::visit(TakeStep{pieces}, step);
}

}  // namespace trireme::text
