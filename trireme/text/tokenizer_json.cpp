#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/text/json_view.h"
#include "trireme/text/load.h"

namespace trireme::text {
namespace {

AddedToken added_token_from(const JsonView& json, const Vocabulary& vocabulary) {
  AddedToken token{.content = json.text_at("content"),
                   .id = 0,
                   .single_word = json.flag_or("single_word", false),
                   .lstrip = json.flag_or("lstrip", false),
                   .rstrip = json.flag_or("rstrip", false),
                   .normalized = json.flag_or("normalized", false),
                   .special = json.flag_or("special", false)};
  const int64_t own = json.at("id").integer();
  if (own < 0 || own >= kMostTokens) {
    json.refuse(fmt::format("gives '{}' the id {}, outside [0, {}); get the file again",
                            printable_line(token.content), own, kMostTokens));
  }
  // A token that the model has as well keeps the model's id.
  token.id = vocabulary.find(token.content).value_or(static_cast<int32_t>(own));
  return token;
}

std::vector<AddedToken> added_tokens_from(const JsonView& root, const Vocabulary& vocabulary) {
  std::vector<AddedToken> tokens;
  if (!root.has("added_tokens")) return tokens;
  for (const JsonView& json : root.at("added_tokens").elements()) {
    tokens.push_back(added_token_from(json, vocabulary));
  }
  return tokens;
}

/// Throws DataError for a token around texts that the vocabulary does not have.
void check_tokens_around(const PostProcessor& processor, int64_t vocab_size, const JsonView& json) {
  for (const Template& tokens : processor) {
    for (const std::optional<int32_t>& id : tokens) {
      if (id && *id >= vocab_size) {
        json.refuse(
            fmt::format("puts the token {} around texts, outside the vocabulary of {}; get the file again",
                        *id, vocab_size));
      }
    }
  }
}

}  // namespace

Tokenizer tokenizer_from_json(const std::string& path) {
  const nlohmann::json json = read_json(path);
  const JsonView root(json, path);
  TokenizerParts parts{.name = path,
                       .normalizer = {},
                       .pre_tokenizer = {},
                       .model = model_from(root.at("model")),
                       .added = {},
                       .post_processor = {},
                       .decoder = {.steps = {}, .separator = " "}};
  if (root.has("normalizer")) parts.normalizer = normalizer_from(root.at("normalizer"));
  if (root.has("pre_tokenizer")) parts.pre_tokenizer = pre_tokenizer_from(root.at("pre_tokenizer"));
  if (root.has("post_processor")) parts.post_processor = post_processor_from(root.at("post_processor"));
  if (root.has("decoder")) parts.decoder = decoder_from(root.at("decoder"));
  parts.added = AddedTokens(added_tokens_from(root, vocabulary_of(parts.model)), parts.normalizer);
  const PostProcessor around = parts.post_processor;
  Tokenizer tokenizer(std::move(parts));
  if (!around.empty()) check_tokens_around(around, tokenizer.vocab_size(), root.at("post_processor"));
  return tokenizer;
}

}  // namespace trireme::text
