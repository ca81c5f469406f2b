#include <array>
#include <charconv>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/text/base64.h"
#include "trireme/text/json_view.h"
#include "trireme/text/load.h"

namespace trireme::text {
namespace {

struct NamedPattern {
  std::string_view name;
  const char* pattern;
};

constexpr const char* kCl100k =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kQwen =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* kO200k =
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

/// The expressions that the makers of the vocabularies publish with them.
const char* pattern_named(std::string_view name) {
  const std::array patterns = {NamedPattern{"gpt2", kGpt2Pattern}, NamedPattern{"cl100k", kCl100k},
                               NamedPattern{"o200k", kO200k}, NamedPattern{"llama3", kCl100k},
                               NamedPattern{"qwen", kQwen}};
  std::vector<std::string> names;
  for (const NamedPattern& row : patterns) {
    if (row.name == name) return row.pattern;
    names.emplace_back(row.name);
  }
  throw ConfigError("[text.tiktoken] there is no pattern '{}'; name one of {}", printable_line(name),
                    join(names, ", "));
}

/// "IQ== 0": bytes in base64 and their rank.
void add_line(std::string_view line, Vocabulary& vocabulary, const std::string& path) {
  const size_t space = std::min(line.find(' '), line.size());
  const auto bytes = decode_base64(line.substr(0, space));
  int64_t rank = -1;
  const std::string_view number = line.substr(std::min(space + 1, line.size()));
  const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), rank);
  if (!bytes || bytes->empty() || error != std::errc() || end != number.data() + number.size()) {
    throw DataError("[text.tiktoken] {}: '{}' is no token, bytes in base64 and a rank; get the file again",
                    path, printable_line(line.substr(0, 80)));
  }
  vocabulary.add(*bytes, rank, path);
}

}  // namespace

Tokenizer tokenizer_from_tiktoken(const std::string& path, std::string_view pattern) {
  Vocabulary vocabulary;
  for (const std::string& line : trireme::split(read_bounded(path), '\n')) {
    if (!line.empty()) add_line(line, vocabulary, path);
  }
  TokenizerParts parts{.name = path,
                       .normalizer = {},
                       .pre_tokenizer = {Split{Regex(pattern_named(pattern)), SplitBehavior::kIsolated}},
                       .model = Bpe::of_bytes(std::move(vocabulary), path),
                       .added = {},
                       .post_processor = {},
                       .decoder = {.steps = {JoinBytes{}}, .separator = ""}};
  return Tokenizer(std::move(parts));
}

}  // namespace trireme::text
