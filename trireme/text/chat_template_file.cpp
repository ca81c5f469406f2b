#include "trireme/text/chat_template_file.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/text/json_view.h"

namespace trireme::text {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSpecialTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                          "pad_token", "cls_token", "mask_token"};

/// The JSON of a file that may be missing.
std::optional<nlohmann::json> json_if_any(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return std::nullopt;
  return read_json(path.string());
}

fs::path folder_of(const std::string& tokenizer) {
  std::error_code ignored;
  const fs::path path = tokenizer;
  return fs::is_directory(path, ignored) ? path : path.parent_path();
}

/// A special token is a string, or an object with its content and how it is found.
std::string token_text(const JsonView& token) {
  return token.value().is_object() ? token.text_at("content") : token.text();
}

void add_tokens(ChatFields& tokens, const JsonView& file) {
  for (const char* name : kSpecialTokens) {
    if (find_field(tokens, name) == nullptr && file.has(name))
      tokens.emplace_back(name, ChatValue::text(token_text(file.at(name))));
  }
}

ChatFields special_tokens_in(const fs::path& folder) {
  ChatFields tokens;
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    const fs::path path = folder / name;
    if (const auto json = json_if_any(path)) add_tokens(tokens, JsonView(*json, path.string()));
  }
  return tokens;
}

std::optional<std::string> template_in(const JsonView& config) {
  if (!config.has("chat_template")) return std::nullopt;
  const JsonView found = config.at("chat_template");
  if (!found.value().is_array()) return found.text();
  for (const JsonView& each : found.elements()) {
    if (each.text_at("name") == "default") return each.text_at("template");
  }
  found.refuse(
      "has no template named 'default'; save the one to use as a file, and name it by data.chat_template");
}

ChatTemplate from_file(const fs::path& path) {
  return {read_bounded(path.string()), path.string()};
}

ChatTemplate template_beside(const fs::path& folder) {
  std::error_code ignored;
  if (fs::is_regular_file(folder / "chat_template.jinja", ignored))
    return from_file(folder / "chat_template.jinja");
  const fs::path config = folder / "tokenizer_config.json";
  if (const auto json = json_if_any(config)) {
    if (const auto source = template_in(JsonView(*json, config.string())))
      return {*source, config.string() + ": chat_template"};
  }
  throw ConfigError(
      "[text.chat_template] there is no chat template beside the tokenizer: {} has neither "
      "chat_template.jinja nor a "
      "tokenizer_config.json with chat_template; name a file by data.chat_template",
      folder.empty() ? "." : folder.string());
}

}  // namespace

ChatTemplate load_chat_template(const std::string& file, const std::string& tokenizer) {
  std::error_code ignored;
  if (!file.empty() && !fs::is_regular_file(file, ignored))
    throw ConfigError("[text.chat_template] there is no file {}; data.chat_template names a Jinja template",
                      file);
  const fs::path folder = folder_of(tokenizer);
  ChatTemplate chat = file.empty() ? template_beside(folder) : from_file(file);
  chat.set_special_tokens(special_tokens_in(folder));
  return chat;
}

}  // namespace trireme::text
