#include "trireme/text/decoder.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "trireme/base/utf8.h"
#include "trireme/text/byte_level.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

using Tokens = std::vector<std::string>;

constexpr std::string_view kMetaspace = "\xe2\x96\x81";  // U+2581

std::string replaced(std::string_view text, std::string_view from, std::string_view to) {
  return replace_all(text, std::string(from), to);
}

std::string join_tokens(const Tokens& tokens, std::string_view separator) {
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0) text += separator;
    text += tokens[i];
  }
  return text;
}

std::optional<int> hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return std::nullopt;
}

/// The byte that a token as "<0x0A>" stands for.
std::optional<char> fallback_byte(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return std::nullopt;
  const auto low = hex_digit(token[4]);
  const auto high =
      token[3] == '+' ? std::optional<int>(0) : hex_digit(token[3]);  // Rust's numbers may have a sign
  if (!low || !high) return std::nullopt;
  return static_cast<char>(*high * 16 + *low);
}

/// `bytes` as a text, or one U+FFFD for each of them.
void flush_bytes(std::string& bytes, Tokens& texts) {
  if (is_utf8(bytes)) {
    if (!bytes.empty()) texts.push_back(bytes);
  } else {
    texts.insert(texts.end(), bytes.size(), "\xef\xbf\xbd");
  }
  bytes.clear();
}

std::string strip_token(std::string_view token, const StripTokens& step) {
  size_t begin = 0, end = token.size();
  for (int64_t i = 0; i < step.start && begin < end; ++i) {
    const CodePoint point = code_point_at(token, begin);
    if (point.value != step.content) break;
    begin += point.length;
  }
  for (int64_t i = 0; i < step.stop && end > begin; ++i) {
    const CodePoint point = code_point_at(token, character_begin(token, end - 1));
    if (point.value != step.content) break;
    end -= point.length;
  }
  return std::string(token.substr(begin, end - begin));
}

/// As the library `transformers` tidies English text, in its order.
std::string clean_up(std::string text) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 11> kRules = {{{" .", "."},
                                                                                     {" ?", "?"},
                                                                                     {" !", "!"},
                                                                                     {" ,", ","},
                                                                                     {" ' ", "'"},
                                                                                     {" n't", "n't"},
                                                                                     {" 'm", "'m"},
                                                                                     {" do not", " don't"},
                                                                                     {" 's", "'s"},
                                                                                     {" 've", "'ve"},
                                                                                     {" 're", "'re"}}};
  for (const auto& [from, to] : kRules) text = replaced(text, from, to);
  return text;
}

/// The tokens after `change(token, i)`.
template <typename Change>
Tokens each(Tokens tokens, Change change) {
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = change(tokens[i], i);
  return tokens;
}

struct TakeDecoderStep {
  Tokens tokens;

  Tokens operator()(const DecodeByteLevel&) {
    std::string bytes;
    for (const std::string& token : tokens) bytes += spelled_bytes(token).value_or(token);
    return {replace_invalid(bytes)};
  }

  Tokens operator()(const JoinBytes&) { return {replace_invalid(join_tokens(tokens, ""))}; }

  Tokens operator()(const DecodeByteFallback&) {
    Tokens texts;
    std::string bytes;
    for (std::string& token : tokens) {
      if (const auto byte = fallback_byte(token)) {
        bytes += *byte;
        continue;
      }
      flush_bytes(bytes, texts);
      texts.push_back(std::move(token));
    }
    flush_bytes(bytes, texts);
    return texts;
  }

  Tokens operator()(const Fuse&) { return {join_tokens(tokens, "")}; }

  Tokens operator()(const StripTokens& step) {
    return each(std::move(tokens),
                [&](const std::string& token, size_t) { return strip_token(token, step); });
  }

  Tokens operator()(const ReplaceInTokens& step) {
    return each(std::move(tokens), [&](const std::string& token, size_t) {
      return replace_all(token, step.pattern, step.content);
    });
  }

  Tokens operator()(const DecodeMetaspace& step) {
    return each(std::move(tokens), [&](const std::string& token, size_t i) {
      return replaced(token, step.replacement, i == 0 && step.drops_first ? "" : " ");
    });
  }

  Tokens operator()(const DecodeWordPiece& step) {
    return each(std::move(tokens), [&](const std::string& token, size_t i) {
      const bool continues = token.starts_with(step.prefix);
      std::string text = i == 0 ? token : continues ? token.substr(step.prefix.size()) : " " + token;
      return step.cleanup ? clean_up(std::move(text)) : text;
    });
  }

  Tokens operator()(const DecodeSentencePiece& step) {
    bool at_begin = step.drops_first || step.drops_all;
    return each(std::move(tokens), [&](std::string token, size_t) {
      const bool is_unknown = token == step.unknown;
      if (at_begin && !is_unknown && token.starts_with(kMetaspace)) {
        token.erase(0, kMetaspace.size());
        at_begin = step.drops_all;
      }
      at_begin = at_begin && !is_unknown && token.empty();
      return is_unknown ? step.unknown_surface : replaced(token, kMetaspace, " ");
    });
  }

  Tokens operator()(const DecodeBpe& step) {
    const size_t count = tokens.size();
    return each(std::move(tokens), [&](const std::string& token, size_t i) {
      return replaced(token, step.suffix, i + 1 == count ? "" : " ");
    });
  }
};

}  // namespace

std::string decode(const Decoder& decoder, std::vector<std::string> tokens) {
  for (const DecoderStep& step : decoder.steps) tokens = std::visit(TakeDecoderStep{std::move(tokens)}, step);
  return join_tokens(tokens, decoder.separator);
}

}  // namespace trireme::text
