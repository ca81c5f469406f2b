#pragma once
// PCRE2's Unicode is older than that of the `tokenizers` that a file was written for. A text that is matched
// shows it, in place of a character that it does not know, one of the same category and length.
#include <string>
#include <string_view>

namespace trireme::text {

bool needs_stand_ins(std::string_view text);
/// As long as `text`, and all places in it are the same.
std::string with_stand_ins(std::string_view text);

}  // namespace trireme::text
