#pragma once
// Expressions of a chat template, with the precedence that Jinja2 gives to their operators.
#include <string>
#include <string_view>
#include <vector>

#include "trireme/text/chat_template_lexer.h"
#include "trireme/text/chat_template_syntax.h"

namespace trireme::text {

/// Reads tokens one after another. All functions throw ConfigError naming the line of what they cannot read.
class ChatExpressionParser {
 public:
  /// Both must outlive the parser.
  ChatExpressionParser(const std::vector<ChatToken>& tokens, const std::string& name)
      : tokens_(tokens), name_(name) {}

  ChatExpressionPtr expression();
  /// Without a condition behind it: `x if y` ends before the `if`.
  ChatExpressionPtr simple_expression() { return either(); }
  /// One, or a tuple of those that commas separate.
  ChatExpressionPtr expression_or_tuple(bool with_condition);

  const ChatToken& current() const { return tokens_[position_]; }
  const ChatToken& next() const { return tokens_[std::min(position_ + 1, tokens_.size() - 1)]; }
  bool at_operator(std::string_view text) const { return is(current(), ChatToken::Kind::kOperator, text); }
  bool at_name(std::string_view text) const { return is(current(), ChatToken::Kind::kName, text); }
  ChatToken take();
  bool skip_operator(std::string_view text);
  bool skip_name(std::string_view text);
  void expect_operator(std::string_view text);
  std::string expect_name();
  [[noreturn]] void refuse(std::string_view problem) const;
  [[noreturn]] void refuse_current() const;
  /// Throws when statements or brackets are nested too deep; the counter goes down with the object.
  class Nesting {
   public:
    explicit Nesting(ChatExpressionParser& parser);
    ~Nesting() { --parser_.nesting_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    ChatExpressionParser& parser_;
  };

 private:
  static bool is(const ChatToken& token, ChatToken::Kind kind, std::string_view text) {
    return token.kind == kind && token.text == text;
  }
  ChatExpressionPtr make(ChatExpression::Kind kind, std::string name,
                         std::vector<ChatExpressionPtr> parts) const;
  ChatExpressionPtr pair(ChatExpression::Kind kind, std::string name, ChatExpressionPtr left,
                         ChatExpressionPtr right) const;
  void check_depth(ChatExpression& node) const;

  ChatExpressionPtr either();
  ChatExpressionPtr both();
  ChatExpressionPtr negated();
  ChatExpressionPtr comparison();
  std::string comparison_operator();
  ChatExpressionPtr sum();
  ChatExpressionPtr concatenation();
  ChatExpressionPtr product();
  ChatExpressionPtr signed_value(bool with_filters);
  ChatExpressionPtr primary();
  ChatExpressionPtr named();
  ChatExpressionPtr number();
  ChatExpressionPtr strings();
  ChatExpressionPtr list();
  ChatExpressionPtr mapping();
  ChatExpressionPtr postfix(ChatExpressionPtr node);
  ChatExpressionPtr subscript(ChatExpressionPtr node);
  ChatExpressionPtr filtered(ChatExpressionPtr node);
  ChatExpressionPtr filter(ChatExpressionPtr node);
  ChatExpressionPtr test(ChatExpressionPtr node);
  ChatExpressionPtr call(ChatExpressionPtr node);
  ChatArguments call_arguments();

  const std::vector<ChatToken>& tokens_;
  const std::string& name_;
  size_t position_ = 0;
  int nesting_ = 0;
};

}  // namespace trireme::text
