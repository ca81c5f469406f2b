#pragma once
// The table of replacements that SentencePiece compiles into its models ("precompiled_charsmap"): a
// double-array trie (Aoe 1989, as the library darts-clone lays it out) over UTF-8, and the texts that its
// values point to.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::text {

class Charsmap {
 public:
  /// `bytes` as in the file; empty ones replace nothing. Throws DataError naming `where` when they are
  /// damaged.
  Charsmap(std::string_view bytes, const std::string& where);

  /// As `tokenizers` applies it: a grapheme cluster of less than six bytes is replaced by what stands for the
  /// shortest beginning of it that is in the table, and of other clusters each character so. Throws
  /// EnvironmentError in a build without utf8proc unless the table is empty.
  std::string apply(std::string_view text) const;

  /// A text in the table that another one begins with.
  struct Entry {
    size_t length;
    std::string_view replacement;
  };
  /// The longest one, which is what SentencePiece replaces.
  std::optional<Entry> longest(std::string_view text) const;

 private:
  std::optional<Entry> find(std::string_view text, bool longest) const;
  void append(std::string& result, std::string_view grapheme) const;

  std::vector<uint32_t> units_;
  std::string texts_;  ///< each ends with a zero byte
};

}  // namespace trireme::text
