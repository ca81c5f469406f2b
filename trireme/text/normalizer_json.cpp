#include <array>

#include "trireme/base/error.h"
#include "trireme/text/base64.h"
#include "trireme/text/components.h"
#include "trireme/text/normalizer.h"

namespace trireme::text {
namespace {

BertCleaning bert_from(const JsonView& json) {
  const bool lowercase = json.flag_or("lowercase", true);
  return {.clean_text = json.flag_or("clean_text", true),
          .handle_chinese_chars = json.flag_or("handle_chinese_chars", true),
          .strip_accents = json.flag_or("strip_accents", lowercase),
          .lowercase = lowercase};
}

Charsmap charsmap_from(const JsonView& json) {
  const JsonView map = json.at("precompiled_charsmap");
  const std::optional<std::string> bytes = decode_base64(map.text());
  if (!bytes) map.refuse("is no base64; get the file again");
  if (!bytes->empty()) require_normal_forms();
  return Charsmap(*bytes, map.where());
}

using MakeStep = NormalizerStep (*)(const JsonView&);
struct NamedStep {
  std::string_view name;
  MakeStep make;
};

template <NormalForm kForm>
NormalizerStep form_from(const JsonView&) {
  require_normal_forms();
  return kForm;
}

const std::array kNormalizers = {
    NamedStep{"NFC", form_from<NormalForm::kNfc>},
    NamedStep{"NFD", form_from<NormalForm::kNfd>},
    NamedStep{"NFKC", form_from<NormalForm::kNfkc>},
    NamedStep{"NFKD", form_from<NormalForm::kNfkd>},
    NamedStep{"Lowercase", [](const JsonView&) -> NormalizerStep { return Lowercase{}; }},
    NamedStep{"StripAccents", [](const JsonView&) -> NormalizerStep { return StripAccents{}; }},
    NamedStep{"Strip",
              [](const JsonView& json) -> NormalizerStep {
                return Strip{json.flag_or("strip_left", true), json.flag_or("strip_right", true)};
              }},
    NamedStep{"Replace",
              [](const JsonView& json) -> NormalizerStep {
                return Replace{pattern_from(json.at("pattern")), json.text_at("content")};
              }},
    NamedStep{"Prepend",
              [](const JsonView& json) -> NormalizerStep { return Prepend{json.text_at("prepend")}; }},
    NamedStep{"BertNormalizer", [](const JsonView& json) -> NormalizerStep { return bert_from(json); }},
    NamedStep{"Nmt", [](const JsonView&) -> NormalizerStep { return NmtCleaning{}; }},
    NamedStep{"ByteLevel", [](const JsonView&) -> NormalizerStep { return SpellBytes{}; }},
    NamedStep{"Precompiled", [](const JsonView& json) -> NormalizerStep { return charsmap_from(json); }},
};

}  // namespace

Pattern pattern_from(const JsonView& json) {
  if (json.has("Regex")) return Regex(json.text_at("Regex"));
  return json.text_at("String");
}

Normalizer normalizer_from(const JsonView& json) {
  Normalizer steps;
  for (const JsonView& part : components_of(json, "normalizers")) {
    steps.push_back(named(kNormalizers, part, "normalizer").make(part));
  }
  return steps;
}

}  // namespace trireme::text
