#pragma once
// Properties of code points as Python's `tokenizers` has them, and what it sees otherwise than PCRE2 and
// utf8proc. tools/make_unicode_tables.py writes the tables; unicode.h asks them.
#include <cstdint>
#include <span>

namespace trireme::text {

/// The code points from `first` to `last`.
struct CodeRange {
  uint32_t first, last;
};

/// Every `stride`-th code point from `first` to `last` has a lower case, which is `change` away.
struct LowerRun {
  uint32_t first, last, stride;
  int32_t change;
};

/// For a code point of this range PCRE2 is shown `other`, which is as long in UTF-8.
struct StandIn {
  uint32_t first, last, other;
};

// Each is sorted, and its ranges do not overlap.
extern const std::span<const CodeRange> kSpaces;           ///< White_Space
extern const std::span<const CodeRange> kNumbers;          ///< general category N
extern const std::span<const CodeRange> kPunctuation;      ///< general category P, and ASCII's signs
extern const std::span<const CodeRange> kWordCharacters;   ///< \w of Rust's `regex`
extern const std::span<const CodeRange> kMarks;            ///< what StripAccents takes away
extern const std::span<const CodeRange> kNonspacingMarks;  ///< what BertNormalizer takes for accents
extern const std::span<const CodeRange> kControls;         ///< what BertNormalizer's clean_text takes away
extern const std::span<const CodeRange> kIdeographs;       ///< what BertNormalizer puts spaces around
extern const std::span<const CodeRange> kLeftAlone;        ///< starters without a normal form of their own
extern const std::span<const LowerRun> kLowerRuns;         ///< but U+0130, whose lower case is two
extern const std::span<const StandIn> kStandIns;

}  // namespace trireme::text
