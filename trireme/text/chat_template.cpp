#include "trireme/text/chat_template.h"

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/utf8.h"
#include "trireme/text/chat_template_parser.h"

namespace trireme::text {
namespace {

constexpr size_t kLargestTemplate = size_t{1} << 20;

const std::string& checked_source(const std::string& source, const std::string& name) {
  if (source.size() > kLargestTemplate)
    throw ConfigError(
        "[text.chat_template] {} has {} bytes, more than the {} of any chat template; name another", name,
        source.size(), kLargestTemplate);
  if (!is_utf8(source)) throw ConfigError("[text.chat_template] {} is not UTF-8; save it as UTF-8", name);
  return source;
}

}  // namespace

ChatTemplate::ChatTemplate(const std::string& source, std::string name)
    : name_(std::move(name)),
      source_(checked_source(source, name_)),
      statements_(std::make_shared<const ChatStatements>(parse_chat_template(source_, name_))) {}

std::string ChatTemplate::special_token(std::string_view name) const {
  const ChatValue* token = find_field(special_tokens_, name);
  return token != nullptr && token->string() != nullptr ? *token->string() : "";
}

std::string ChatTemplate::digest() const {
  StreamingHash hash;
  const auto add = [&hash](const std::string& text) {
    const uint64_t size = text.size();  // so that two texts do not run into each other
    hash.update(&size, sizeof size);
    hash.update(text.data(), text.size());
  };
  add(source_);
  for (const auto& [name, token] : special_tokens_) {
    add(name);
    add(special_token(name));
  }
  return hex64(hash.digest());
}

ChatText ChatTemplate::render(const nlohmann::ordered_json& messages, bool add_generation_prompt) const {
  ChatFields variables = special_tokens_;
  set_field(variables, "messages", chat_value_of(messages));
  set_field(variables, "tools", ChatValue::none());
  set_field(variables, "documents", ChatValue::none());
  set_field(variables, "add_generation_prompt", ChatValue::flag(add_generation_prompt));
  return run_chat_template(*statements_, name_, variables);
}

}  // namespace trireme::text
