#include "trireme/text/chat_template_parser.h"

#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/text/chat_expression_parser.h"
#include "trireme/text/chat_template_lexer.h"

namespace trireme::text {
namespace {

using Body = std::shared_ptr<const ChatStatements>;

class TemplateParser {
 public:
  TemplateParser(std::string_view source, const std::string& name)
      : tokens_(chat_tokens(source, name)), in_(tokens_, name) {}

  ChatStatements run() {
    ChatStatements statements;
    while (in_.current().kind != ChatTokenKind::kEnd) {
      if (at_tag("end")) in_.refuse(fmt::format("{{% {} %}} closes nothing", in_.next().text));
      statements.push_back(statement());
    }
    return statements;
  }

 private:
  /// Whether a block follows whose name begins with `prefix`.
  bool at_tag(std::string_view prefix) const {
    return in_.current().kind == ChatTokenKind::kBlockBegin && in_.next().text.starts_with(prefix);
  }

  /// The statements up to a block named one of `ends`, whose name was then taken.
  Body body_until(std::initializer_list<std::string_view> ends, std::string& end) {
    const ChatExpressionParser::Nesting nesting(in_);
    in_.skip_operator(":");
    end_of_block();
    auto statements = std::make_shared<ChatStatements>();
    const auto at_end = [&] {
      return in_.current().kind == ChatTokenKind::kBlockBegin &&
             std::ranges::count(ends, in_.next().text) > 0;
    };
    while (!at_end()) {
      if (in_.current().kind == ChatTokenKind::kEnd)
        in_.refuse(fmt::format("{{% {} %}} is missing at the end", *(ends.end() - 1)));
      if (at_tag("end")) in_.refuse(fmt::format("{{% {} %}} closes nothing here", in_.next().text));
      statements->push_back(statement());
    }
    in_.take();
    end = in_.take().text;
    return statements;
  }

  void end_of_block() {
    if (in_.current().kind != ChatTokenKind::kBlockEnd) in_.refuse_current();
    in_.take();
  }

  ChatStatement made(ChatStatementKind kind) const {
    ChatStatement statement;
    statement.kind = kind;
    statement.line = in_.current().line;
    return statement;
  }

  ChatStatement statement() {
    const ChatTokenKind kind = in_.current().kind;
    ChatStatement statement =
        made(kind == ChatTokenKind::kData ? ChatStatementKind::kData : ChatStatementKind::kOutput);
    if (kind == ChatTokenKind::kData) {
      statement.text = in_.take().text;
      return statement;
    }
    const ChatToken opener = in_.take();
    if (opener.kind == ChatTokenKind::kBlockBegin) return block();
    statement.value = in_.expression_or_tuple(true);
    if (in_.current().kind != ChatTokenKind::kVariableEnd) in_.refuse_current();
    in_.take();
    return statement;
  }

  ChatStatement block() {
    const std::string name = in_.expect_name();
    if (name == "if") return conditional();
    if (name == "for") return loop();
    if (name == "set") return assignment();
    if (name == "macro") return macro();
    if (name == "generation") return enclosed(ChatStatementKind::kGeneration, "endgeneration");
    if (name == "break" || name == "continue") return jump(name);
    in_.refuse(fmt::format(
        "{{% {} %}} is not read; there are if, for, set, macro, generation, break and continue", name));
  }

  ChatStatement conditional() {
    ChatStatement statement = made(ChatStatementKind::kIf);
    std::string end = "elif";
    while (end == "elif") {
      ChatExpressionPtr condition = in_.expression_or_tuple(false);
      Body body = body_until({"elif", "else", "endif"}, end);
      statement.branches.push_back({std::move(condition), std::move(body)});
    }
    if (end == "else") statement.branches.push_back({nullptr, body_until({"endif"}, end)});
    end_of_block();
    return statement;
  }

  ChatStatement loop() {
    ChatStatement statement = made(ChatStatementKind::kFor);
    statement.targets = targets();
    if (!in_.skip_name("in")) in_.refuse("'in' is missing in a for");
    statement.value = in_.expression_or_tuple(false);
    if (in_.skip_name("if")) statement.condition = in_.expression();
    if (in_.at_name("recursive")) in_.refuse("recursive loops are not read; use a macro that calls itself");
    std::string end;
    ++loops_;
    statement.body = body_until({"else", "endfor"}, end);
    --loops_;
    if (end == "else") statement.otherwise = body_until({"endfor"}, end);
    end_of_block();
    return statement;
  }

  ChatStatement jump(const std::string& name) {
    ChatStatement statement =
        made(name == "break" ? ChatStatementKind::kBreak : ChatStatementKind::kContinue);
    if (loops_ == 0) in_.refuse(fmt::format("{{% {} %}} stands outside a loop", name));
    end_of_block();
    return statement;
  }

  std::vector<std::string> targets() {
    const bool in_brackets = in_.skip_operator("(");
    std::vector<std::string> names = {in_.expect_name()};
    while (in_.skip_operator(",")) names.push_back(in_.expect_name());
    if (in_brackets) in_.expect_operator(")");
    return names;
  }

  ChatStatement assignment() {
    ChatStatement statement = made(ChatStatementKind::kSet);
    statement.targets = targets();
    if (in_.skip_operator(".")) {
      if (statement.targets.size() != 1) in_.refuse("a field is assigned to among several names");
      statement.targets[0] += "." + in_.expect_name();
    }
    if (in_.at_operator("|")) in_.refuse("filters of a set block are not read; filter the name later");
    if (!in_.skip_operator("=")) return block_assignment(std::move(statement));
    statement.value = in_.expression_or_tuple(true);
    end_of_block();
    return statement;
  }

  ChatStatement block_assignment(ChatStatement statement) {
    std::string end;
    statement.kind = ChatStatementKind::kSetBlock;
    statement.body = own_body("endset");
    end_of_block();
    return statement;
  }

  ChatStatement enclosed(ChatStatementKind kind, std::string_view end_name) {
    ChatStatement statement = made(kind);
    statement.body = own_body(end_name);
    end_of_block();
    return statement;
  }

  /// A body that no loop around it can be left from: Jinja2 makes a function of it.
  Body own_body(std::string_view end_name) {
    std::string end;
    const int loops = std::exchange(loops_, 0);
    Body body = body_until({end_name}, end);
    loops_ = loops;
    return body;
  }

  ChatStatement macro() {
    ChatStatement statement = made(ChatStatementKind::kMacro);
    auto syntax = std::make_shared<ChatMacroSyntax>();
    syntax->name = in_.expect_name();
    in_.expect_operator("(");
    while (!in_.at_operator(")")) {
      if (!syntax->parameters.empty()) in_.expect_operator(",");
      if (!in_.at_operator(")")) syntax->parameters.push_back(parameter());
    }
    in_.expect_operator(")");
    syntax->body = own_body("endmacro");
    end_of_block();
    statement.macro = std::move(syntax);
    return statement;
  }

  ChatParameter parameter() {
    ChatParameter made{in_.expect_name(), nullptr};
    if (in_.skip_operator("=")) made.fallback = in_.expression();
    return made;
  }

  const std::vector<ChatToken> tokens_;
  ChatExpressionParser in_;
  int loops_ = 0;
};

}  // namespace

ChatStatements parse_chat_template(std::string_view source, const std::string& name) {
  return TemplateParser(source, name).run();
}

}  // namespace trireme::text
