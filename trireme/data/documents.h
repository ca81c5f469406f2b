#pragma once
// Where documents begin and end in a text.
#include <cstddef>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

namespace trireme::data {

/// A line of this alone ends a document, as in the TinyStories text files.
inline constexpr std::string_view kSeparatorLine = "<|endoftext|>";

/// Walks over the runs of text between separator lines, as views into `text`; a text without such a line is
/// one document. Documents of no bytes are left out; what is kept is kept byte for byte.
class Documents {
 public:
  /// `while_searching` is called at least once for each 16 MiB that are searched for the end of a document.
  explicit Documents(
      std::string_view text, std::function<void()> while_searching = [] {});
  /// The next document; none at the end of the text.
  std::optional<std::string_view> next();

 private:
  struct Cut {
    size_t begin;  ///< first byte of the separator line
    size_t end;    ///< first byte of the line after it
  };
  size_t find_separator(size_t from) const;
  Cut next_cut() const;

  std::string_view text_;
  std::function<void()> while_searching_;
  size_t begin_ = 0;  ///< of what is still to come
};

/// A document in pieces of at most `limit` bytes, cut after a line end where there is one, so that tokenising
/// needs little memory. Calls body(piece).
void for_each_piece(std::string_view document, size_t limit,
                    const std::function<void(std::string_view)>& body);

}  // namespace trireme::data
