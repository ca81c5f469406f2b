#include "trireme/text/chat_template_methods.h"

#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/text/chat_template_lexer.h"
#include "trireme/text/chat_template_operators.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr auto kStringMethods = std::to_array<std::string_view>(
    {"strip",     "lstrip",       "rstrip",       "split",      "rsplit",     "startswith",   "endswith",
     "replace",   "upper",        "lower",        "capitalize", "title",      "find",         "count",
     "join",      "removeprefix", "removesuffix", "splitlines", "format",     "format_map",   "encode",
     "index",     "rfind",        "rindex",       "center",     "ljust",      "rjust",        "zfill",
     "partition", "rpartition",   "casefold",     "swapcase",   "expandtabs", "translate",    "maketrans",
     "isalnum",   "isalpha",      "isascii",      "isdecimal",  "isdigit",    "isidentifier", "islower",
     "isnumeric", "isprintable",  "isspace",      "istitle",    "isupper"});
constexpr size_t kLongestSeparator = 64;  // a search from the right takes time in proportion to it
constexpr auto kMappingMethods =
    std::to_array<std::string_view>({"get", "items", "keys", "values", "copy", "pop", "popitem", "update",
                                     "setdefault", "clear", "fromkeys"});
constexpr auto kListMethods = std::to_array<std::string_view>(
    {"append", "extend", "insert", "remove", "pop", "clear", "index", "count", "sort", "reverse", "copy"});

bool is_among(std::span<const std::string_view> names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

bool is_all_ascii(std::string_view text) {
  return std::ranges::none_of(text, [](char byte) { return (byte & 0x80) != 0; });
}

char ascii_upper(char c) {
  return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
}

/// Whether `text` has the code point as one of its characters.
bool has_character(std::string_view text, uint32_t code) {
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    if (point.value == code) return true;
    i += point.length;
  }
  return false;
}

ChatValue piece(ChatContext& context, std::string_view text) {
  return context.made_text(std::string(text));
}

ChatList split_at_spaces(ChatContext& context, std::string_view text, int64_t most) {
  ChatList pieces;
  for (text = strip_left(text); !text.empty(); text = strip_left(text)) {
    if (most >= 0 && static_cast<int64_t>(pieces.size()) == most) {
      pieces.push_back(piece(context, strip_right(text)));
      break;
    }
    size_t end = 0;
    while (end < text.size() && !is_python_space(code_point_at(text, end).value)) {
      end += character_length(text[end]);
    }
    pieces.push_back(piece(context, text.substr(0, end)));
    text.remove_prefix(std::min(end, text.size()));
  }
  return pieces;
}

ChatList split_at(ChatContext& context, std::string_view text, std::string_view separator, int64_t most) {
  if (separator.empty()) context.refuse("split gets an empty separator");
  ChatList pieces;
  while (most < 0 || static_cast<int64_t>(pieces.size()) < most) {
    const size_t end = find_text(context, text, separator);
    if (end == std::string_view::npos) break;
    pieces.push_back(piece(context, text.substr(0, end)));
    text.remove_prefix(end + separator.size());
  }
  pieces.push_back(piece(context, text));
  return pieces;
}

ChatList split_from_right(ChatContext& context, std::string_view text, std::string_view separator,
                          int64_t most) {
  if (separator.empty()) context.refuse("rsplit gets an empty separator");
  if (separator.size() > kLongestSeparator) context.refuse("rsplit gets a separator of more than 64 bytes");
  ChatList pieces;
  while (most < 0 || static_cast<int64_t>(pieces.size()) < most) {
    const size_t begin = text.rfind(separator);
    context.spend(1 + text.size() - (begin == std::string_view::npos ? 0 : begin));
    if (begin == std::string_view::npos) break;
    pieces.push_back(piece(context, text.substr(begin + separator.size())));
    text = text.substr(0, begin);
  }
  pieces.push_back(piece(context, text));
  std::ranges::reverse(pieces);
  return pieces;
}

ChatValue split(ChatContext& context, const std::string& text, const ChatCall& call, bool from_right) {
  const ChatGiven given(context, "split", call, {"sep", "maxsplit"});
  const int64_t most = given.get(1) == nullptr ? -1 : context.integer(*given.get(1), "split");
  const bool at_spaces = given.get(0) == nullptr || given.get(0)->is<ChatValue::None>();
  if (at_spaces && from_right && most >= 0) context.refuse("rsplit at spaces is not read with maxsplit");
  if (at_spaces) return context.made_list(split_at_spaces(context, text, most));
  const std::string& separator = context.string(*given.get(0), "split");
  return context.made_list(from_right ? split_from_right(context, text, separator, most)
                                      : split_at(context, text, separator, most));
}

ChatValue has_end(ChatContext& context, const std::string& text, const ChatCall& call, bool at_begin) {
  const std::string_view name = at_begin ? "startswith" : "endswith";
  const ChatGiven given(context, name, call, {"affix"});
  const ChatValue& affix = given.need(0);
  const auto holds = [&](const ChatValue& value) {
    const std::string& part = context.string(value, name);
    return at_begin ? text.starts_with(part) : text.ends_with(part);
  };
  const auto* several = affix.as<ChatValue::List>();
  if (several == nullptr || !several->is_tuple) return ChatValue::flag(holds(affix));
  return ChatValue::flag(std::ranges::any_of(*several->items, holds));
}

ChatValue without_affix(ChatContext& context, std::string_view text, const ChatCall& call, bool at_begin) {
  const ChatGiven given(context, at_begin ? "removeprefix" : "removesuffix", call, {"affix"});
  const std::string& affix = context.string(given.need(0), "removeprefix");
  if (at_begin && text.starts_with(affix)) text.remove_prefix(affix.size());
  if (!at_begin && text.ends_with(affix)) text.remove_suffix(affix.size());
  return piece(context, text);
}

ChatValue found_at(ChatContext& context, const std::string& text, const ChatCall& call) {
  const ChatGiven given(context, "find", call, {"sub"});
  const size_t found = find_text(context, text, context.string(given.need(0), "find"));
  if (found == std::string::npos) return ChatValue::integer(-1);
  return ChatValue::integer(count_code_points(std::string_view(text).substr(0, found)));
}

ChatValue counted(ChatContext& context, const std::string& text, const ChatCall& call) {
  const ChatGiven given(context, "count", call, {"sub"});
  const std::string& part = context.string(given.need(0), "count");
  if (part.empty()) return ChatValue::integer(count_code_points(text) + 1);
  int64_t count = 0;
  for (size_t at = find_text(context, text, part); at != std::string::npos;
       at = find_text(context, text, part, at + part.size())) {
    ++count;
  }
  return ChatValue::integer(count);
}

ChatValue joined(ChatContext& context, const std::string& separator, const ChatCall& call) {
  const ChatGiven given(context, "join", call, {"iterable"});
  std::string text;
  bool is_first = true;
  for (const ChatValue& item : context.items_of(given.need(0))) {
    if (!std::exchange(is_first, false)) text += separator;
    text += context.string(item, "join");
    context.spend(separator.size() + item.string()->size());
  }
  return context.made_text(std::move(text));
}

/// Python counts more line ends than \n; the ends themselves are left out.
ChatValue lines_of(ChatContext& context, std::string_view text, const ChatCall& call) {
  const ChatGiven given(context, "splitlines", call, {});
  const auto ends_line = [](uint32_t code) {
    return (code >= 0x0a && code <= 0x0d) || (code >= 0x1c && code <= 0x1e) || code == 0x85 ||
           code == 0x2028 || code == 0x2029;
  };
  ChatList lines;
  size_t begin = 0;
  for (size_t i = 0; i < text.size();) {
    const CodePoint point = code_point_at(text, i);
    const size_t end = i;
    i += point.length;
    if (!ends_line(point.value)) continue;
    if (point.value == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.push_back(piece(context, text.substr(begin, end - begin)));
    begin = i;
  }
  if (begin < text.size()) lines.push_back(piece(context, text.substr(begin)));
  return context.made_list(std::move(lines));
}

ChatValue strip(ChatContext& context, const std::string& text, const ChatCall& call, bool left, bool right) {
  const ChatGiven given(context, "strip", call, {"chars"});
  return context.made_text(stripped(context, text, given.get(0), left, right));
}

ChatValue replace(ChatContext& context, const std::string& text, const ChatCall& call) {
  const ChatGiven given(context, "replace", call, {"old", "new", "count"});
  const int64_t count = given.get(2) == nullptr ? -1 : context.integer(*given.get(2), "replace");
  return context.made_text(replaced(context, text, context.string(given.need(0), "replace"),
                                    context.string(given.need(1), "replace"), count));
}

ChatValue call_of_string(ChatContext& context, const std::string& text, const std::string& name,
                         const ChatCall& call) {
  if (name == "strip" || name == "lstrip" || name == "rstrip")
    return strip(context, text, call, name != "rstrip", name != "lstrip");
  if (name == "split" || name == "rsplit") return split(context, text, call, name == "rsplit");
  if (name == "startswith" || name == "endswith") return has_end(context, text, call, name == "startswith");
  if (name == "removeprefix" || name == "removesuffix")
    return without_affix(context, text, call, name == "removeprefix");
  if (name == "replace") return replace(context, text, call);
  if (name == "find") return found_at(context, text, call);
  if (name == "count") return counted(context, text, call);
  if (name == "join") return joined(context, text, call);
  if (name == "splitlines") return lines_of(context, text, call);
  const bool changes_case = name == "upper" || name == "lower" || name == "capitalize";
  if (!changes_case) context.refuse(fmt::format("the method {} of strings is not read", name));
  const ChatGiven none(context, name, call, {});
  return context.made_text(name == "upper"   ? upper_text(context, text)
                           : name == "lower" ? lower_text(context, text)
                                             : capitalized(context, text));
}

ChatValue call_of_mapping(ChatContext& context, const ChatFields& fields, const std::string& name,
                          const ChatCall& call) {
  if (name == "get") {
    const ChatGiven given(context, name, call, {"key", "default"});
    const std::string* key = given.need(0).string();
    context.spend(fields.size());
    const ChatValue* found = key == nullptr ? nullptr : find_field(fields, *key);
    return found != nullptr ? *found : given.get(1) != nullptr ? *given.get(1) : ChatValue::none();
  }
  const ChatGiven given(context, name, call, {});
  ChatList parts;
  if (name == "items") return pairs_of(context, fields);
  if (name != "keys" && name != "values")
    context.refuse(fmt::format("the method {} of mappings is not read", name));
  for (const auto& [key, value] : fields) parts.push_back(name == "keys" ? ChatValue::text(key) : value);
  return context.made_list(std::move(parts));
}

}  // namespace

bool is_chat_method(const ChatValue& value, std::string_view name) {
  if (value.string() != nullptr) return is_among(kStringMethods, name);
  if (value.fields() != nullptr) return is_among(kMappingMethods, name);
  return value.items() != nullptr && is_among(kListMethods, name);
}

ChatValue call_chat_method(ChatContext& context, const ChatValue& value, const std::string& name,
                           const ChatCall& call) {
  if (value.string() != nullptr) return call_of_string(context, *value.string(), name, call);
  if (value.fields() != nullptr) return call_of_mapping(context, *value.fields(), name, call);
  context.refuse(fmt::format("the method {} of {} is not read", name, value.type_name()));
}

std::string upper_text(ChatContext& context, std::string_view text) {
  if (!is_all_ascii(text)) context.refuse("upper case is read for ASCII letters only");
  std::string upper(text);
  std::ranges::transform(upper, upper.begin(), ascii_upper);
  return upper;
}

std::string lower_text(ChatContext& context, std::string_view text) {
  constexpr uint32_t kSigma = 0x3a3;  // its lower case depends on the letters around it
  if (has_character(text, kSigma)) context.refuse("the lower case of a Greek sigma is not read");
  return to_lower(text);
}

std::string capitalized(ChatContext& context, std::string_view text) {
  if (!is_all_ascii(text)) context.refuse("capitals are read for ASCII letters only");
  std::string lower = to_lower(text);
  if (!lower.empty()) lower[0] = ascii_upper(lower[0]);
  return lower;
}

std::string stripped(ChatContext& context, std::string_view text, const ChatValue* characters, bool left,
                     bool right) {
  context.spend(text.size());
  const bool at_spaces = characters == nullptr || characters->is<ChatValue::None>();
  if (at_spaces) {
    if (left) text = strip_left(text);
    return std::string(right ? strip_right(text) : text);
  }
  const std::string& set = context.string(*characters, "strip");
  while (left && !text.empty() && has_character(set, code_point_at(text, 0).value)) {
    context.spend(set.size());
    text.remove_prefix(code_point_at(text, 0).length);
  }
  while (right && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (text[last] & 0xc0) == 0x80) --last;
    if (!has_character(set, code_point_at(text, last).value)) break;
    context.spend(set.size());
    text.remove_suffix(text.size() - last);
  }
  return std::string(text);
}

std::string replaced(ChatContext& context, std::string_view text, std::string_view old, std::string_view by,
                     int64_t count) {
  if (old.empty()) context.refuse("replace gets an empty text to look for");
  std::string result;
  for (; count != 0; --count) {
    const size_t found = find_text(context, text, old);
    if (found == std::string_view::npos) break;
    context.spend(found + by.size());
    result.append(text.substr(0, found)).append(by);
    text.remove_prefix(found + old.size());
  }
  return result.append(text);
}

ChatValue pairs_of(ChatContext& context, const ChatFields& fields) {
  ChatList pairs;
  for (const auto& [key, value] : fields)
    pairs.push_back(context.made_list({ChatValue::text(key), value}, true));
  return context.made_list(std::move(pairs));
}

}  // namespace trireme::text
