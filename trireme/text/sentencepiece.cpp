// Numbers of fields and types are those of sentencepiece_model.proto.
#include <protozero/exception.hpp>
#include <protozero/pbf_reader.hpp>

#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/text/json_view.h"
#include "trireme/text/load.h"

namespace trireme::text {
namespace {

enum class PieceType { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
enum class ModelType { kUnigram = 1, kBpe = 2 };

struct SentencePiece {
  std::string text;
  float score = 0.0f;
  PieceType type = PieceType::kNormal;
};

struct SentencePieceFile {
  std::vector<SentencePiece> pieces;
  ModelType type = ModelType::kUnigram;
  bool byte_fallback = false;
  bool spaces_are_suffixes = false;
  std::string unknown_surface = " \xe2\x81\x87 ";
  std::string charsmap;
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = true;
  bool escape_whitespaces = true;
};

using protozero::pbf_wire_type;

/// The message, whose field has this type: protozero leaves it to its users to see that. Throws
/// protozero::exception for another one.
protozero::pbf_reader& expect(protozero::pbf_reader& message, pbf_wire_type type) {
  if (!message.has_wire_type(type)) throw protozero::unknown_pbf_wire_type_exception();
  return message;
}

std::string bytes_of(protozero::pbf_reader& message) {
  return expect(message, pbf_wire_type::length_delimited).get_bytes();
}

protozero::pbf_reader message_of(protozero::pbf_reader& message) {
  return expect(message, pbf_wire_type::length_delimited).get_message();
}

float float_of(protozero::pbf_reader& message) {
  return expect(message, pbf_wire_type::fixed32).get_float();
}

int32_t number_of(protozero::pbf_reader& message) {
  return expect(message, pbf_wire_type::varint).get_int32();
}

SentencePiece piece_from(protozero::pbf_reader message) {
  SentencePiece piece;
  while (message.next()) {
    switch (message.tag()) {
      case 1:
        piece.text = bytes_of(message);
        break;
      case 2:
        piece.score = float_of(message);
        break;
      case 3:
        piece.type = static_cast<PieceType>(number_of(message));
        break;
      default:
        message.skip();
    }
  }
  return piece;
}

void read_trainer(protozero::pbf_reader message, SentencePieceFile& file) {
  while (message.next()) {
    switch (message.tag()) {
      case 3:
        file.type = static_cast<ModelType>(number_of(message));
        break;
      case 24:
        file.spaces_are_suffixes = number_of(message) != 0;
        break;
      case 35:
        file.byte_fallback = number_of(message) != 0;
        break;
      case 44:
        file.unknown_surface = bytes_of(message);
        break;
      default:
        message.skip();
    }
  }
}

void read_normalizer(protozero::pbf_reader message, SentencePieceFile& file) {
  while (message.next()) {
    switch (message.tag()) {
      case 2:
        file.charsmap = bytes_of(message);
        break;
      case 3:
        file.add_dummy_prefix = number_of(message) != 0;
        break;
      case 4:
        file.remove_extra_whitespaces = number_of(message) != 0;
        break;
      case 5:
        file.escape_whitespaces = number_of(message) != 0;
        break;
      default:
        message.skip();
    }
  }
}

SentencePieceFile read_sentencepiece(const std::string& path) {
  const std::string bytes = read_bounded(path);
  SentencePieceFile file;
  try {
    protozero::pbf_reader message(bytes);
    while (message.next()) {
      switch (message.tag()) {
        case 1:
          file.pieces.push_back(piece_from(message_of(message)));
          break;
        case 2:
          read_trainer(message_of(message), file);
          break;
        case 3:
          read_normalizer(message_of(message), file);
          break;
        default:
          message.skip();
      }
    }
  } catch (const protozero::exception& error) {
    throw DataError(
        "[text.sentencepiece] {} is no model of SentencePiece, or is cut short ({}); get the file again",
        path, error.what());
  }
  return file;
}

[[noreturn]] void refuse_feature(const std::string& path, std::string_view feature) {
  throw ConfigError(
      "[text.sentencepiece] {} has {}, which is not read; convert it to a tokenizer.json with the Python "
      "library transformers",
      path, feature);
}

/// Not unused pieces, which are cut up again after they were put together.
bool is_read(PieceType type) {
  return type == PieceType::kNormal || type == PieceType::kUnknown || type == PieceType::kControl ||
         type == PieceType::kUserDefined || type == PieceType::kByte;
}

void check_features(const SentencePieceFile& file, const std::string& path) {
  if (file.type != ModelType::kUnigram && file.type != ModelType::kBpe)
    refuse_feature(path,
                   fmt::format("the model type {}, neither unigram nor BPE", static_cast<int>(file.type)));
  if (file.spaces_are_suffixes) refuse_feature(path, "treat_whitespace_as_suffix");
  if (!file.escape_whitespaces) refuse_feature(path, "escape_whitespaces=false");
  for (const SentencePiece& piece : file.pieces) {
    if (!is_read(piece.type)) {
      refuse_feature(path, fmt::format("the piece '{}' of type {}", printable_line(piece.text),
                                       static_cast<int>(piece.type)));
    }
    if (!is_utf8(piece.text) || !std::isfinite(piece.score)) {
      throw DataError("[text.sentencepiece] {}: '{}' is no UTF-8 or has no finite score; get the file again",
                      path, printable_line(piece.text));
    }
  }
}

/// User-defined pieces are left as they are, even where a replacement begins with the same characters.
Normalizer normalizer_of(const SentencePieceFile& file, const std::string& path) {
  Trie kept;
  for (const SentencePiece& piece : file.pieces) {
    if (piece.type == PieceType::kUserDefined) kept.insert(piece.text, 0);
  }
  return {SentencePieceNormalizer{Charsmap(file.charsmap, path), std::move(kept), file.add_dummy_prefix,
                                  file.remove_extra_whitespaces}};
}

size_t unknown_of(const SentencePieceFile& file, const std::string& path) {
  for (size_t id = 0; id < file.pieces.size(); ++id) {
    if (file.pieces[id].type == PieceType::kUnknown) return id;
  }
  throw DataError("[text.sentencepiece] {} has no unknown symbol among its {} pieces; get the file again",
                  path, file.pieces.size());
}

Model bpe_of(const SentencePieceFile& file, const std::string& unknown, const std::string& path) {
  Vocabulary vocabulary;
  std::vector<std::optional<float>> scores;
  std::vector<int32_t> whole;
  for (const SentencePiece& piece : file.pieces) {
    const auto id = static_cast<int32_t>(scores.size());
    vocabulary.add(piece.text, id, path);
    if (piece.type == PieceType::kUserDefined) whole.push_back(id);
    scores.push_back(piece.type == PieceType::kNormal ? std::optional(piece.score) : std::nullopt);
  }
  Bpe model =
      Bpe::of_scores(std::move(vocabulary), scores,
                     {.unknown = unknown, .fuse_unknown = true, .byte_fallback = file.byte_fallback}, path);
  model.keep_whole(whole);
  return model;
}

Model unigram_of(const SentencePieceFile& file, size_t unknown, const std::string& path) {
  Unigram::Pieces pieces;
  std::vector<bool> not_in_text, preferred;
  for (const SentencePiece& piece : file.pieces) {
    pieces.emplace_back(piece.text, static_cast<double>(piece.score));
    preferred.push_back(piece.type == PieceType::kUserDefined);
    not_in_text.push_back(piece.type != PieceType::kNormal && !preferred.back());
  }
  return Unigram(pieces,
                 {.unknown = static_cast<int64_t>(unknown),
                  .byte_fallback = file.byte_fallback,
                  .single_precision = true,
                  .not_in_text = not_in_text,
                  .preferred = preferred},
                 path);
}

AddedTokens control_symbols(const SentencePieceFile& file) {
  std::vector<AddedToken> tokens;
  for (size_t id = 0; id < file.pieces.size(); ++id) {
    if (file.pieces[id].type != PieceType::kControl) continue;
    tokens.push_back(
        {.content = file.pieces[id].text, .id = static_cast<int32_t>(id), .special = true, .in_text = false});
  }
  return {std::move(tokens), {}};
}

}  // namespace

Tokenizer tokenizer_from_sentencepiece(const std::string& path) {
  const SentencePieceFile file = read_sentencepiece(path);
  check_features(file, path);
  const size_t unknown = unknown_of(file, path);
  const std::string& unknown_text = file.pieces[unknown].text;
  TokenizerParts parts{
      .name = path,
      .normalizer = normalizer_of(file, path),
      .pre_tokenizer = {},
      .model =
          file.type == ModelType::kBpe ? bpe_of(file, unknown_text, path) : unigram_of(file, unknown, path),
      .added = control_symbols(file),
      .post_processor = {},
      .decoder = {.steps = {DecodeByteFallback{},
                            DecodeSentencePiece{unknown_text, file.unknown_surface, file.add_dummy_prefix,
                                                file.remove_extra_whitespaces}},
                  .separator = ""}};
  return Tokenizer(std::move(parts));
}

}  // namespace trireme::text
