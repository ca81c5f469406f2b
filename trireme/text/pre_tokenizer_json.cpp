#include <array>

#include "trireme/base/error.h"
#include "trireme/text/components.h"
#include "trireme/text/normalizer.h"
#include "trireme/text/pre_tokenizer.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

struct NamedBehavior {
  std::string_view name;
  SplitBehavior behavior;
};

constexpr std::array kBehaviors = {
    NamedBehavior{"Removed", SplitBehavior::kRemoved},
    NamedBehavior{"Isolated", SplitBehavior::kIsolated},
    NamedBehavior{"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
    NamedBehavior{"MergedWithNext", SplitBehavior::kMergedWithNext},
    NamedBehavior{"Contiguous", SplitBehavior::kContiguous},
};

SplitBehavior behavior_from(const JsonView& json) {
  const std::string name = json.text();
  for (const NamedBehavior& row : kBehaviors) {
    if (row.name == name) return row.behavior;
  }
  json.refuse(
      "is no behaviour of a split: Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

Split digits_from(const JsonView& json) {
  const bool individual = json.flag_or("individual_digits", false);
  return {&is_number, individual ? SplitBehavior::kIsolated : SplitBehavior::kContiguous};
}

Metaspace metaspace_from(const JsonView& json) {
  std::string replacement = "\xe2\x96\x81";  // U+2581
  if (json.has("replacement")) {
    replacement.clear();
    append_utf8(replacement, json.at("replacement").character());
  }
  return {replacement, prepend_scheme_from(json), json.flag_or("split", true)};
}

using MakeSteps = PreTokenizer (*)(const JsonView&);
struct NamedSteps {
  std::string_view name;
  MakeSteps make;
};

const std::array kPreTokenizers = {
    NamedSteps{"ByteLevel",
               [](const JsonView& json) -> PreTokenizer {
                 return {ByteLevel{json.flag_or("add_prefix_space", true), json.flag_or("use_regex", true)}};
               }},
    NamedSteps{"Split",
               [](const JsonView& json) -> PreTokenizer {
                 return {Split{pattern_from(json.at("pattern")), behavior_from(json.at("behavior")),
                               json.flag_or("invert", false)}};
               }},
    NamedSteps{"Whitespace", [](const JsonView&) -> PreTokenizer { return {Whitespace{}}; }},
    NamedSteps{"WhitespaceSplit",
               [](const JsonView&) -> PreTokenizer {
                 return {Split{&is_space, SplitBehavior::kRemoved}};
               }},
    NamedSteps{"BertPreTokenizer",
               [](const JsonView&) -> PreTokenizer {
                 return {Split{&is_space, SplitBehavior::kRemoved},
                         Split{&is_punctuation, SplitBehavior::kIsolated}};
               }},
    NamedSteps{"Punctuation",
               [](const JsonView& json) -> PreTokenizer {
                 return {Split{&is_punctuation, json.has("behavior") ? behavior_from(json.at("behavior"))
                                                                     : SplitBehavior::kIsolated}};
               }},
    NamedSteps{"Digits", [](const JsonView& json) -> PreTokenizer { return {digits_from(json)}; }},
    NamedSteps{"CharDelimiterSplit",
               [](const JsonView& json) -> PreTokenizer {
                 return {Split{json.text_at("delimiter"), SplitBehavior::kRemoved}};
               }},
    NamedSteps{"Metaspace", [](const JsonView& json) -> PreTokenizer { return {metaspace_from(json)}; }},
};

}  // namespace

PrependScheme prepend_scheme_from(const JsonView& json) {
  const std::string scheme =
      json.text_or("prepend_scheme", json.flag_or("add_prefix_space", true) ? "always" : "never");
  if (scheme == "always") return PrependScheme::kAlways;
  if (scheme == "first") return PrependScheme::kFirst;
  if (scheme == "never") return PrependScheme::kNever;
  json.at("prepend_scheme").refuse("is none of always, first and never");
}

PreTokenizer pre_tokenizer_from(const JsonView& json) {
  PreTokenizer steps;
  for (const JsonView& part : components_of(json, "pretokenizers")) {
    for (PreTokenizerStep& step : named(kPreTokenizers, part, "pre-tokenizer").make(part)) {
      steps.push_back(std::move(step));
    }
  }
  return steps;
}

}  // namespace trireme::text
