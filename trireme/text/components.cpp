#include "trireme/text/components.h"

#include "trireme/base/text.h"
#include "trireme/base/utf8.h"

namespace trireme::text {
namespace {

constexpr int kDeepest = 16;

void flatten(const JsonView& json, const char* key, int depth, std::vector<JsonView>& parts) {
  if (json.text_at("type") != "Sequence") {
    parts.push_back(json);
    return;
  }
  if (depth == kDeepest)
    json.refuse(fmt::format("is a sequence nested more than {} deep; flatten it", kDeepest));
  for (const JsonView& part : json.at(key).elements()) flatten(part, key, depth + 1, parts);
}

}  // namespace

std::vector<JsonView> components_of(const JsonView& json, const char* key) {
  std::vector<JsonView> parts;
  flatten(json, key, 0, parts);
  return parts;
}

void refuse_component(const JsonView& part, std::string_view kind, const std::vector<std::string>& known) {
  throw ConfigError("[text.components] {} asks for the {} '{}', which there is not; there are {}",
                    part.where(), kind, printable_line(part.text_at("type")), join(known, ", "));
}

}  // namespace trireme::text
