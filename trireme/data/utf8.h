#pragma once
// Is a text UTF-8? Asked once a file, to warn before a model learns from binary data.
#include <string_view>

namespace trireme::data {

/// Well-formed UTF-8 as in Unicode 15, table 3-7: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool is_utf8(std::string_view text);

}  // namespace trireme::data
