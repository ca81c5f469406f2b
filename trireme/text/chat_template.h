#pragma once
// Conversations as the text that a model reads them in. The template is one of Hugging Face's, of the part of
// Jinja2 that the templates of the common model families use; it renders as Python's jinja2 does when
// `transformers` calls it.
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "trireme/text/chat_template_evaluator.h"

namespace trireme::text {

/// Immutable: threads may share one.
class ChatTemplate {
 public:
  /// `name` is for messages: the path that it was read from. Throws ConfigError naming line and part where
  /// the template has what is not read, is wrong, or is larger than 1 MiB.
  ChatTemplate(const std::string& source, std::string name);

  const std::string& name() const { return name_; }
  /// As `transformers` has special tokens known to a template: bos_token, eos_token and so on.
  void set_special_tokens(ChatFields tokens) { special_tokens_ = std::move(tokens); }
  /// The special token `name`, such as "eos_token"; empty: the template was given none.
  std::string special_token(std::string_view name) const;
  /// A hash of everything that its texts depend on.
  std::string digest() const;

  /// The text of `messages`, an array of objects with "role" and "content". With `add_generation_prompt` it
  /// ends where the assistant begins to write, for templates that know that. Throws ConfigError naming the
  /// line where the template refuses the conversation or works without end.
  ChatText render(const nlohmann::ordered_json& messages, bool add_generation_prompt) const;

 private:
  std::string name_, source_;
  std::shared_ptr<const ChatStatements> statements_;
  ChatFields special_tokens_;
};

}  // namespace trireme::text
