#include "trireme/text/post_processor.h"

#include <array>

#include "trireme/text/components.h"
#include "trireme/text/vocabulary.h"

namespace trireme::text {
namespace {

int32_t id_from(const JsonView& json) {
  const int64_t id = json.integer();
  if (id < 0 || id >= kMostTokens) json.refuse("is no id of a token; get the file again");
  return static_cast<int32_t>(id);
}

/// "single" of TemplateProcessing: [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}].
PostProcessor template_from(const JsonView& json) {
  Template tokens;
  for (const JsonView& part : json.at("single").elements()) {
    if (part.has("Sequence")) {
      if (part.at("Sequence").text_at("id") != "A")
        part.refuse("names a second text, which a single one has not");
      tokens.emplace_back();
      continue;
    }
    const std::string token = part.at("SpecialToken").text_at("id");
    for (const JsonView& id : json.at("special_tokens").at(token.c_str()).at("ids").elements()) {
      tokens.emplace_back(id_from(id));
    }
  }
  return {tokens};
}

/// ["[SEP]", 102].
int32_t token_from(const JsonView& json) {
  const std::vector<JsonView> pair = json.elements();
  if (pair.size() != 2) json.refuse("is no pair of a token and its id; get the file again");
  return id_from(pair[1]);
}

PostProcessor around_from(const JsonView& json) {
  return {{token_from(json.at("cls")), std::nullopt, token_from(json.at("sep"))}};
}

struct NamedProcessor {
  std::string_view name;
  PostProcessor (*make)(const JsonView&);
};

const std::array kPostProcessors = {
    NamedProcessor{"TemplateProcessing", template_from},
    NamedProcessor{"BertProcessing", around_from},
    NamedProcessor{"RobertaProcessing", around_from},
    // Changes where tokens are said to begin, and no token.
    NamedProcessor{"ByteLevel", [](const JsonView&) { return PostProcessor{}; }},
};

}  // namespace

std::vector<int32_t> post_process(const PostProcessor& processor, std::vector<int32_t> ids) {
  for (const Template& tokens : processor) {
    std::vector<int32_t> processed;
    processed.reserve(ids.size() + tokens.size());
    for (const std::optional<int32_t>& token : tokens) {
      if (token) {
        processed.push_back(*token);
      } else {
        processed.insert(processed.end(), ids.begin(), ids.end());
      }
    }
    ids = std::move(processed);
  }
  return ids;
}

PostProcessor post_processor_from(const JsonView& json) {
  PostProcessor templates;
  for (const JsonView& part : components_of(json, "processors")) {
    for (Template& tokens : named(kPostProcessors, part, "post-processor").make(part)) {
      templates.push_back(std::move(tokens));
    }
  }
  return templates;
}

}  // namespace trireme::text
