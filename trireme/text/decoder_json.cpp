#include <array>

#include "trireme/text/components.h"
#include "trireme/text/decoder.h"
#include "trireme/text/normalizer.h"
#include "trireme/text/pre_tokenizer.h"

namespace trireme::text {
namespace {

using MakeDecoderStep = DecoderStep (*)(const JsonView&);
struct NamedDecoder {
  std::string_view name;
  MakeDecoderStep make;
};

const std::array kDecoders = {
    NamedDecoder{"ByteLevel", [](const JsonView&) -> DecoderStep { return DecodeByteLevel{}; }},
    NamedDecoder{"ByteFallback", [](const JsonView&) -> DecoderStep { return DecodeByteFallback{}; }},
    NamedDecoder{"Fuse", [](const JsonView&) -> DecoderStep { return Fuse{}; }},
    NamedDecoder{"Strip",
                 [](const JsonView& json) -> DecoderStep {
                   return StripTokens{json.at("content").character(), json.integer_or("start", 0),
                                      json.integer_or("stop", 0)};
                 }},
    NamedDecoder{"Replace",
                 [](const JsonView& json) -> DecoderStep {
                   return ReplaceInTokens{pattern_from(json.at("pattern")), json.text_at("content")};
                 }},
    NamedDecoder{"Metaspace",
                 [](const JsonView& json) -> DecoderStep {
                   return DecodeMetaspace{json.text_or("replacement", "\xe2\x96\x81"),
                                          prepend_scheme_from(json) != PrependScheme::kNever};
                 }},
    NamedDecoder{"WordPiece",
                 [](const JsonView& json) -> DecoderStep {
                   return DecodeWordPiece{json.text_or("prefix", "##"), json.flag_or("cleanup", true)};
                 }},
    NamedDecoder{
        "BPEDecoder",
        [](const JsonView& json) -> DecoderStep { return DecodeBpe{json.text_or("suffix", "</w>")}; }},
};

}  // namespace

Decoder decoder_from(const JsonView& json) {
  Decoder decoder;
  for (const JsonView& part : components_of(json, "decoders")) {
    decoder.steps.push_back(named(kDecoders, part, "decoder").make(part));
  }
  return decoder;
}

}  // namespace trireme::text
