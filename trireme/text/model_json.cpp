#include <array>
#include <nlohmann/json.hpp>

#include "trireme/base/log.h"
#include "trireme/text/components.h"
#include "trireme/text/model.h"

namespace trireme::text {
namespace {

/// "a b" or, in newer files, ["a", "b"].
std::pair<std::string, std::string> merge_from(const nlohmann::json& merge, const JsonView& merges,
                                               size_t i) {
  const auto refuse = [&] {
    merges.refuse(
        fmt::format("has at {} no merge, two tokens with a space between them; get the file again", i));
  };
  if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  if (!merge.is_string()) refuse();
  const auto& pair = merge.get_ref<const std::string&>();
  const size_t space = pair.find(' ');
  if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) refuse();
  return {pair.substr(0, space), pair.substr(space + 1)};
}

Bpe::Pairs merges_from(const JsonView& json) {
  if (!json.value().is_array()) json.refuse_type("an array of merges");
  Bpe::Pairs pairs;
  pairs.reserve(json.value().size());
  for (const nlohmann::json& merge : json.value()) pairs.push_back(merge_from(merge, json, pairs.size()));
  return pairs;
}

Model bpe_from(const JsonView& json) {
  if (json.has("dropout") && json.at("dropout").number() > 0) {
    log_warning(
        "{}: dropout {} of merges is for training with tokens drawn at random; texts are encoded without it",
        json.where(), json.at("dropout").number());
  }
  return Bpe(vocabulary_from(json.at("vocab")), merges_from(json.at("merges")),
             {.unknown = json.text_or("unk_token", ""),
              .continuing_subword_prefix = json.text_or("continuing_subword_prefix", ""),
              .end_of_word_suffix = json.text_or("end_of_word_suffix", ""),
              .fuse_unknown = json.flag_or("fuse_unk", false),
              .byte_fallback = json.flag_or("byte_fallback", false),
              .ignore_merges = json.flag_or("ignore_merges", false)},
             json.where());
}

Model unigram_from(const JsonView& json) {
  const JsonView vocabulary = json.at("vocab");
  if (!vocabulary.value().is_array())
    vocabulary.refuse_type("an array of tokens and their log probabilities");
  Unigram::Pieces pieces;
  pieces.reserve(vocabulary.value().size());
  for (const nlohmann::json& piece : vocabulary.value()) {
    if (!piece.is_array() || piece.size() != 2 || !piece[0].is_string() || !piece[1].is_number()) {
      vocabulary.refuse(
          fmt::format("has at {} no token with its log probability; get the file again", pieces.size()));
    }
    pieces.emplace_back(piece[0].get<std::string>(), piece[1].get<double>());
  }
  const auto unknown = json.has("unk_id") ? std::optional(json.at("unk_id").integer()) : std::nullopt;
  return Unigram(pieces, {.unknown = unknown, .byte_fallback = json.flag_or("byte_fallback", false)},
                 json.where());
}

Model word_piece_from(const JsonView& json) {
  return WordPiece(vocabulary_from(json.at("vocab")),
                   {.unknown = json.text_or("unk_token", "[UNK]"),
                    .prefix = json.text_or("continuing_subword_prefix", "##"),
                    .longest_word = json.integer_or("max_input_chars_per_word", 100)},
                   json.where());
}

Model word_level_from(const JsonView& json) {
  return WordLevel(vocabulary_from(json.at("vocab")), json.text_or("unk_token", "<unk>"), json.where());
}

struct NamedModel {
  std::string_view name;
  Model (*make)(const JsonView&);
};

constexpr std::array kModels = {NamedModel{"BPE", bpe_from}, NamedModel{"Unigram", unigram_from},
                                NamedModel{"WordPiece", word_piece_from},
                                NamedModel{"WordLevel", word_level_from}};

}  // namespace

Model model_from(const JsonView& json) {
  return named(kModels, json, "model").make(json);
}

}  // namespace trireme::text
