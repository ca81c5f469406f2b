#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>

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

struct PublishedRanks {
  std::string_view name;  ///< of the file, without .tiktoken
  std::string_view pattern;
  bool composes = false;  ///< the text is normalised to NFC
  std::vector<std::pair<std::string, int32_t>> special;
};

std::vector<std::pair<std::string, int32_t>> special_of_qwen() {
  constexpr int32_t kFirst = 151643, kExtras = 205;
  std::vector<std::pair<std::string, int32_t>> special = {
      {"<|endoftext|>", kFirst}, {"<|im_start|>", kFirst + 1}, {"<|im_end|>", kFirst + 2}};
  for (int32_t i = 0; i < kExtras; ++i) special.emplace_back(fmt::format("<|extra_{}|>", i), kFirst + 3 + i);
  return special;
}

/// Files hold ranks alone; the rest stands in the programs of their makers, tiktoken and Qwen's tokenizer.
const std::vector<PublishedRanks>& published_ranks() {
  static const std::vector<PublishedRanks> all = {
      {.name = "r50k_base", .pattern = "gpt2", .special = {{"<|endoftext|>", 50256}}},
      {.name = "p50k_base", .pattern = "gpt2", .special = {{"<|endoftext|>", 50256}}},
      {.name = "cl100k_base",
       .pattern = "cl100k",
       .special = {{"<|endoftext|>", 100257},
                   {"<|fim_prefix|>", 100258},
                   {"<|fim_middle|>", 100259},
                   {"<|fim_suffix|>", 100260},
                   {"<|endofprompt|>", 100276}}},
      {.name = "o200k_base",
       .pattern = "o200k",
       .special = {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}}},
      {.name = "qwen", .pattern = "qwen", .composes = true, .special = special_of_qwen()}};
  return all;
}

const PublishedRanks& published_as(const std::string& path) {
  const std::string stem = std::filesystem::path(path).stem().string();
  std::vector<std::string> names;
  for (const PublishedRanks& known : published_ranks()) {
    if (known.name == stem) return known;
    names.push_back(fmt::format("{}.tiktoken", known.name));
  }
  throw ConfigError(
      "[text.tiktoken] {} has ranks alone, and its name does not tell how words are cut and which tokens are "
      "special, as that of {} does; if it is one of these, give it that name, else name the tokenizer.json "
      "of the same model",
      path, join(names, ", "));
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

Vocabulary read_ranks(const std::string& path) {
  Vocabulary vocabulary;
  for (const std::string& line : trireme::split(read_bounded(path), '\n')) {
    if (!line.empty()) add_line(line, vocabulary, path);
  }
  return vocabulary;
}

TokenizerParts parts_of(Vocabulary vocabulary, const std::string& path, std::string_view pattern) {
  return {.name = path,
          .normalizer = {},
          .pre_tokenizer = {Split{Regex(pattern_named(pattern)), SplitBehavior::kIsolated}},
          .model = Bpe::of_bytes(std::move(vocabulary), path),
          .added = {},
          .post_processor = {},
          .decoder = {.steps = {JoinBytes{}}, .separator = ""}};
}

/// Throws DataError where the file gives the id of a special token to another one.
std::vector<AddedToken> special_tokens_of(const PublishedRanks& known, const Vocabulary& vocabulary,
                                          const std::string& path) {
  std::vector<AddedToken> tokens;
  for (const auto& [content, id] : known.special) {
    if (vocabulary.token(id)) {
      throw DataError("[text.tiktoken] {}: rank {} is that of {} in {}.tiktoken; get the file again", path,
                      id, content, known.name);
    }
    tokens.push_back({.content = content, .id = id, .special = true});
  }
  return tokens;
}

}  // namespace

Tokenizer tokenizer_from_tiktoken(const std::string& path, std::string_view pattern) {
  pattern_named(pattern);  // which may be wrong whatever the file holds
  return Tokenizer(parts_of(read_ranks(path), path, pattern));
}

Tokenizer tokenizer_from_tiktoken(const std::string& path) {
  const PublishedRanks& known = published_as(path);
  Vocabulary vocabulary = read_ranks(path);
  std::vector<AddedToken> special = special_tokens_of(known, vocabulary, path);
  TokenizerParts parts = parts_of(std::move(vocabulary), path, known.pattern);
  if (known.composes) parts.normalizer = {NormalForm::kNfc};
  parts.added = AddedTokens(std::move(special), parts.normalizer);
  return Tokenizer(std::move(parts));
}

}  // namespace trireme::text
