#pragma once
// Where a text is cut into pieces: at matches of a pattern, which go away, stay, or join a neighbour.
#include <functional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "trireme/text/regex.h"
#include "trireme/text/span.h"

namespace trireme::text {

/// The treatment of a match, in the names of `tokenizers`.
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

using IsDelimiter = bool (*)(uint32_t code);
/// A text to be found as it is, an expression, or a property of single characters.
using Pattern = std::variant<std::string, Regex, IsDelimiter>;

/// Appends the matches of `pattern` in `text`, from left to right, without overlap.
void find_all(const Pattern& pattern, std::string_view text, std::vector<Span>& matches);

/// Appends the pieces of `text`, none of them empty, each moved by `offset`. `invert` takes what is between
/// matches for the matches.
void split(const Pattern& pattern, SplitBehavior behavior, bool invert, std::string_view text, size_t offset,
           std::vector<Span>& pieces);

/// `text` with `content` in place of each match.
std::string replace_all(std::string_view text, const Pattern& pattern, std::string_view content);

}  // namespace trireme::text
