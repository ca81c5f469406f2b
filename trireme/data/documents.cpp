#include "trireme/data/documents.h"

#include <algorithm>
#include <utility>

namespace trireme::data {
namespace {

constexpr size_t kSearchBytes = size_t{16} << 20;

/// End of the line whose text ends at `position`, past its line break; npos: there is more text on the line.
size_t line_end(std::string_view text, size_t position) {
  if (position < text.size() && text[position] == '\r') ++position;
  if (position == text.size()) return position;
  return text[position] == '\n' ? position + 1 : std::string_view::npos;
}

}  // namespace

Documents::Documents(std::string_view text, std::function<void()> while_searching)
    : text_(text), while_searching_(std::move(while_searching)) {}

/// The first kSeparatorLine at or after `from`, whether or not it has a line for itself.
size_t Documents::find_separator(size_t from) const {
  for (size_t window = from; window < text_.size(); window += kSearchBytes) {
    const size_t found = text_.substr(window, kSearchBytes + kSeparatorLine.size() - 1).find(kSeparatorLine);
    if (found != std::string_view::npos) return window + found;
    while_searching_();
  }
  return std::string_view::npos;
}

/// The first separator line of what is still to come; begins at the end of the text when there is none.
Documents::Cut Documents::next_cut() const {
  for (size_t begin = find_separator(begin_); begin != std::string_view::npos;
       begin = find_separator(begin + 1)) {
    const bool at_line_start = begin == 0 || text_[begin - 1] == '\n';
    const size_t end = line_end(text_, begin + kSeparatorLine.size());
    if (at_line_start && end != std::string_view::npos) return {begin, end};
  }
  return {text_.size(), text_.size()};
}

std::optional<std::string_view> Documents::next() {
  while (begin_ < text_.size()) {
    const Cut cut = next_cut();
    const size_t begin = std::exchange(begin_, cut.end);
    if (cut.begin > begin) return text_.substr(begin, cut.begin - begin);
  }
  return std::nullopt;
}

void for_each_piece(std::string_view document, size_t limit,
                    const std::function<void(std::string_view)>& body) {
  while (document.size() > limit) {
    const size_t line = document.substr(0, limit).rfind('\n');
    const size_t size = line == std::string_view::npos ? limit : line + 1;
    body(document.substr(0, size));
    document.remove_prefix(size);
  }
  if (!document.empty()) body(document);
}

}  // namespace trireme::data
