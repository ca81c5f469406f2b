#pragma once
// Where documents begin and end in a text, and which of them are held out for validation.
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme::data {

/// A line of this alone ends a document, as in the TinyStories text files.
inline constexpr std::string_view kSeparatorLine = "<|endoftext|>";

/// The runs of text between separator lines, as views into `text`; a text without such a line is one
/// document. Documents of no bytes are left out; what is kept is kept byte for byte.
std::vector<std::string_view> split_documents(std::string_view text);

/// The draw of document `index` of file `name`: held out when below held_out_threshold(). Depends on the name
/// alone, so that adding files never moves a document from one split to the other.
uint64_t held_out_draw(std::string_view name, size_t index);

/// val_fraction in [0, 1) of the range of draws.
uint64_t held_out_threshold(double val_fraction);

/// A text of one document cut in two, training and validation: the last part is held out.
std::pair<std::string_view, std::string_view> cut_document(std::string_view text, double val_fraction);

/// A document in pieces of at most `limit` bytes, cut after a line end where there is one, so that tokenising
/// needs little memory.
std::vector<std::string_view> pieces(std::string_view document, size_t limit);

}  // namespace trireme::data
