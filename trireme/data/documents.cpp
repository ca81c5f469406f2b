#include "trireme/data/documents.h"

#include <cmath>

#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

struct Cut {
  size_t begin;  ///< first byte of the separator line
  size_t end;    ///< first byte of the line after it
};

/// End of the line whose text ends at `position`, past its line break; npos: there is more text on the line.
size_t line_end(std::string_view text, size_t position) {
  if (position < text.size() && text[position] == '\r') ++position;
  if (position == text.size()) return position;
  return text[position] == '\n' ? position + 1 : std::string_view::npos;
}

/// The first separator line at or after `from`; begins at the end of the text when there is none.
Cut next_cut(std::string_view text, size_t from) {
  for (size_t begin = text.find(kSeparatorLine, from); begin != std::string_view::npos;
       begin = text.find(kSeparatorLine, begin + 1)) {
    const bool at_line_start = begin == 0 || text[begin - 1] == '\n';
    const size_t end = line_end(text, begin + kSeparatorLine.size());
    if (at_line_start && end != std::string_view::npos) return {begin, end};
  }
  return {text.size(), text.size()};
}

}  // namespace

std::vector<std::string_view> split_documents(std::string_view text) {
  std::vector<std::string_view> documents;
  for (size_t begin = 0; begin < text.size();) {
    const Cut cut = next_cut(text, begin);
    if (cut.begin > begin) documents.push_back(text.substr(begin, cut.begin - begin));
    begin = cut.end;
  }
  return documents;
}

uint64_t held_out_draw(std::string_view name, size_t index) {
  return mix64(xxh3(name), index);
}

uint64_t held_out_threshold(double val_fraction) {
  return static_cast<uint64_t>(std::ldexp(val_fraction, 64));
}

std::pair<std::string_view, std::string_view> cut_document(std::string_view text, double val_fraction) {
  const auto held_out = static_cast<size_t>(std::llround(static_cast<double>(text.size()) * val_fraction));
  const size_t cut = text.size() - held_out;
  return {text.substr(0, cut), text.substr(cut)};
}

std::vector<std::string_view> pieces(std::string_view document, size_t limit) {
  std::vector<std::string_view> parts;
  while (document.size() > limit) {
    const size_t line = document.rfind('\n', limit - 1);
    const size_t size = line == std::string_view::npos ? limit : line + 1;
    parts.push_back(document.substr(0, size));
    document.remove_prefix(size);
  }
  if (!document.empty()) parts.push_back(document);
  return parts;
}

}  // namespace trireme::data
