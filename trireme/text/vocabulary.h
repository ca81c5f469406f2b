#pragma once
// Tokens and their ids, both ways. Ids need not be without gaps.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "trireme/text/json_view.h"

namespace trireme::text {

/// Hashes strings and views of them alike, so that a view is looked up without a copy.
struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const;
};

/// More than any vocabulary has; a damaged file with a larger id would fill the memory.
inline constexpr int64_t kMostTokens = int64_t{1} << 24;

/// Movable, not copyable: tokens by id point into the map.
class Vocabulary {
 public:
  Vocabulary() = default;
  Vocabulary(Vocabulary&&) = default;
  Vocabulary& operator=(Vocabulary&&) = default;

  /// A token that is there already gets the new id. Throws DataError naming `where` for ids outside
  /// [0, kMostTokens) and for an id that another token has.
  void add(std::string_view token, int64_t id, const std::string& where);
  std::optional<int32_t> find(std::string_view token) const;
  /// Nothing where no token has the id. The view lives as long as the vocabulary.
  std::optional<std::string_view> token(int32_t id) const;
  /// One more than the largest id.
  int64_t size() const { return static_cast<int64_t>(tokens_.size()); }

 private:
  std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>> ids_;
  std::vector<const std::string*> tokens_;
};

/// From a JSON object {token: id}. Throws DataError.
Vocabulary vocabulary_from(const JsonView& json);

/// "<0x0A>": the token for a byte in vocabularies with byte_fallback.
std::string byte_token(unsigned char byte);

/// The ids of the byte_token()s of `text`, or nothing where one is missing.
std::optional<std::vector<int32_t>> byte_ids(const Vocabulary& vocabulary, std::string_view text);

}  // namespace trireme::text
