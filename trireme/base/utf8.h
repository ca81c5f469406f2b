#pragma once
// UTF-8: whether a text is, where its characters begin, and how to show it on a terminal. By hand, since all
// programs link this room, which needs no package: a library would be one for every build, in place of the
// twenty lines that decode and that a test holds for each code point.
#include <cstddef>
#include <string>
#include <string_view>

namespace trireme {

/// Well-formed UTF-8 as in Unicode 15, table 3-7: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

/// The last place at or before `position` that is not inside a character; `position` itself where the bytes
/// around it are no UTF-8.
size_t character_begin(std::string_view text, size_t position);

/// `text` for a terminal: '?' for control characters but line breaks and tabs (C0, DEL and C1, which hold the
/// escape sequences), U+FFFD for bytes that are no UTF-8. What is left cannot move a cursor or change a
/// setting.
std::string printable(std::string_view text);

/// printable() for a text that stands within a line: line breaks and tabs are '?' as well.
std::string printable_line(std::string_view text);

}  // namespace trireme
