#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/text/json_view.h"
#include "trireme/text/load.h"

namespace trireme::text {
namespace {

constexpr std::string_view kEndOfText = "<|endoftext|>";

Bpe::Pairs read_merges(const std::string& path) {
  Bpe::Pairs pairs;
  for (std::string line : trireme::split(read_bounded(path), '\n')) {
    if (line.ends_with('\r')) line.pop_back();
    if (line.empty() || line.starts_with("#version")) continue;
    const size_t space = line.find(' ');
    if (space == std::string::npos || !is_utf8(line)) {
      throw DataError(
          "[text.gpt2] {}: '{}' is no merge, two tokens with a space between them; get the file again", path,
          printable_line(line));
    }
    pairs.emplace_back(line.substr(0, space), line.substr(space + 1));
  }
  return pairs;
}

}  // namespace

Tokenizer tokenizer_from_gpt2(const std::string& vocab_path, const std::string& merges_path) {
  const nlohmann::json json = read_json(vocab_path);
  Vocabulary vocabulary = vocabulary_from(JsonView(json, vocab_path));
  std::vector<AddedToken> added;
  if (const auto id = vocabulary.find(kEndOfText)) {
    added.push_back({.content = std::string(kEndOfText), .id = *id, .special = true});
  }
  TokenizerParts parts{.name = vocab_path,
                       .normalizer = {},
                       .pre_tokenizer = {ByteLevel{.add_prefix_space = false, .use_regex = true}},
                       .model = Bpe(std::move(vocabulary), read_merges(merges_path), {}, merges_path),
                       .added = AddedTokens(std::move(added), {}),
                       .post_processor = {},
                       .decoder = {.steps = {DecodeByteLevel{}}, .separator = ""}};
  return Tokenizer(std::move(parts));
}

}  // namespace trireme::text
