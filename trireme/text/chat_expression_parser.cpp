#include "trireme/text/chat_expression_parser.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/text/chat_template_filters.h"

namespace trireme::text {
namespace {

constexpr int kDeepestNesting = 60;
constexpr int kDeepestTree = 100;

template <typename Number>
Number parsed_number(const ChatToken& token, const std::string& name) {
  Number value{};
  const char* end = token.text.data() + token.text.size();
  const auto [last, error] = std::from_chars(token.text.data(), end, value);
  if (last != end || error != std::errc())
    refuse_chat_template(name, token.line, fmt::format("the number {} is too large", token.text));
  return value;
}

}  // namespace

ChatExpressionParser::Nesting::Nesting(ChatExpressionParser& parser) : parser_(parser) {
  if (parser.nesting_ >= kDeepestNesting)
    parser.refuse(fmt::format("it is nested more than {} deep; make it flatter", kDeepestNesting));
  ++parser.nesting_;
}

ChatToken ChatExpressionParser::take() {
  ChatToken token = current();
  if (position_ + 1 < tokens_.size()) ++position_;
  return token;
}

bool ChatExpressionParser::skip_operator(std::string_view text) {
  if (!at_operator(text)) return false;
  take();
  return true;
}

bool ChatExpressionParser::skip_name(std::string_view text) {
  if (!at_name(text)) return false;
  take();
  return true;
}

void ChatExpressionParser::expect_operator(std::string_view text) {
  if (!skip_operator(text)) refuse(fmt::format("'{}' is missing", text));
}

std::string ChatExpressionParser::expect_name() {
  if (current().kind != ChatTokenKind::kName) refuse_current();
  return take().text;
}

void ChatExpressionParser::refuse(std::string_view problem) const {
  refuse_chat_template(name_, current().line, problem);
}

void ChatExpressionParser::refuse_current() const {
  const bool at_end = current().text.empty() && current().kind != ChatTokenKind::kString;
  refuse(at_end ? "something is missing before the end of a tag"
                : fmt::format("'{}' does not belong here", printable_line(current().text)));
}

void ChatExpressionParser::check_depth(ChatExpression& node) const {
  const auto add = [&node](const ChatExpressionPtr& part) {
    if (part) node.depth = std::max(node.depth, 1 + part->depth);
  };
  for (const auto& part : node.parts) add(part);
  for (const auto& part : node.arguments.positional) add(part);
  for (const auto& [name, part] : node.arguments.named) add(part);
  if (node.depth > kDeepestTree)
    refuse(fmt::format("an expression has more than {} levels; divide it", kDeepestTree));
}

ChatExpressionPtr ChatExpressionParser::make(ChatExpressionKind kind, std::string name,
                                             std::vector<ChatExpressionPtr> parts) const {
  auto node = std::make_unique<ChatExpression>();
  node->kind = kind;
  node->line = current().line;
  node->name = std::move(name);
  node->parts = std::move(parts);
  check_depth(*node);
  return node;
}

ChatExpressionPtr ChatExpressionParser::pair(ChatExpressionKind kind, std::string name,
                                             ChatExpressionPtr left, ChatExpressionPtr right) const {
  std::vector<ChatExpressionPtr> parts;
  parts.push_back(std::move(left));
  parts.push_back(std::move(right));
  return make(kind, std::move(name), std::move(parts));
}

ChatExpressionPtr ChatExpressionParser::expression() {
  const Nesting nesting(*this);
  ChatExpressionPtr value = either();
  while (skip_name("if")) {
    ChatExpressionPtr condition = either();
    ChatExpressionPtr otherwise = skip_name("else") ? expression() : nullptr;
    ChatExpressionPtr node =
        pair(ChatExpressionKind::kConditional, "", std::move(condition), std::move(value));
    node->parts.push_back(std::move(otherwise));
    check_depth(*node);
    value = std::move(node);
  }
  return value;
}

ChatExpressionPtr ChatExpressionParser::expression_or_tuple(bool with_condition) {
  const auto one = [&] { return with_condition ? expression() : simple_expression(); };
  ChatExpressionPtr first = one();
  if (!at_operator(",")) return first;
  std::vector<ChatExpressionPtr> parts;
  parts.push_back(std::move(first));
  while (skip_operator(",")) {
    if (current().kind == ChatTokenKind::kBlockEnd || current().kind == ChatTokenKind::kVariableEnd ||
        at_operator(")"))
      break;
    parts.push_back(one());
  }
  return make(ChatExpressionKind::kTuple, "", std::move(parts));
}

ChatExpressionPtr ChatExpressionParser::either() {
  ChatExpressionPtr left = both();
  while (skip_name("or")) left = pair(ChatExpressionKind::kOr, "", std::move(left), both());
  return left;
}

ChatExpressionPtr ChatExpressionParser::both() {
  ChatExpressionPtr left = negated();
  while (skip_name("and")) left = pair(ChatExpressionKind::kAnd, "", std::move(left), negated());
  return left;
}

ChatExpressionPtr ChatExpressionParser::negated() {
  const Nesting nesting(*this);
  if (!skip_name("not")) return comparison();
  std::vector<ChatExpressionPtr> parts;
  parts.push_back(negated());
  return make(ChatExpressionKind::kNot, "", std::move(parts));
}

std::string ChatExpressionParser::comparison_operator() {
  constexpr auto kComparisons = std::to_array<std::string_view>({"==", "!=", "<", "<=", ">", ">="});
  for (const std::string_view text : kComparisons) {
    if (skip_operator(text)) return std::string(text);
  }
  if (skip_name("in")) return "in";
  if (!at_name("not") || !is(next(), ChatTokenKind::kName, "in")) return {};
  take();
  take();
  return "not in";
}

ChatExpressionPtr ChatExpressionParser::comparison() {
  std::vector<ChatExpressionPtr> parts;
  std::vector<std::string> names;
  parts.push_back(sum());
  for (std::string name = comparison_operator(); !name.empty(); name = comparison_operator()) {
    names.push_back(std::move(name));
    parts.push_back(sum());
  }
  if (names.empty()) return std::move(parts[0]);
  ChatExpressionPtr node = make(ChatExpressionKind::kCompare, "", std::move(parts));
  node->names = std::move(names);
  return node;
}

ChatExpressionPtr ChatExpressionParser::sum() {
  ChatExpressionPtr left = concatenation();
  while (at_operator("+") || at_operator("-")) {
    std::string name = take().text;
    left = pair(ChatExpressionKind::kArithmetic, std::move(name), std::move(left), concatenation());
  }
  return left;
}

ChatExpressionPtr ChatExpressionParser::concatenation() {
  std::vector<ChatExpressionPtr> parts;
  parts.push_back(product());
  while (skip_operator("~")) parts.push_back(product());
  return parts.size() == 1 ? std::move(parts[0]) : make(ChatExpressionKind::kConcat, "", std::move(parts));
}

ChatExpressionPtr ChatExpressionParser::product() {
  ChatExpressionPtr left = signed_value(true);
  while (at_operator("*") || at_operator("/") || at_operator("//") || at_operator("%")) {
    std::string name = take().text;
    left = pair(ChatExpressionKind::kArithmetic, std::move(name), std::move(left), signed_value(true));
  }
  if (at_operator("**")) refuse("the operator ** is not read; multiply instead");
  return left;
}

ChatExpressionPtr ChatExpressionParser::signed_value(bool with_filters) {
  const Nesting nesting(*this);
  ChatExpressionPtr node;
  if (at_operator("-") || at_operator("+")) {
    std::string name = take().text;
    std::vector<ChatExpressionPtr> parts;
    parts.push_back(signed_value(false));
    node = make(ChatExpressionKind::kSign, std::move(name), std::move(parts));
  } else {
    node = primary();
  }
  node = postfix(std::move(node));
  return with_filters ? filtered(std::move(node)) : std::move(node);
}

ChatExpressionPtr ChatExpressionParser::primary() {
  switch (current().kind) {
    case ChatTokenKind::kName:
      return named();
    case ChatTokenKind::kString:
      return strings();
    case ChatTokenKind::kInteger:
    case ChatTokenKind::kFloat:
      return number();
    default:
      break;
  }
  if (at_operator("[")) return list();
  if (at_operator("{")) return mapping();
  if (!skip_operator("(")) refuse_current();
  if (skip_operator(")")) return make(ChatExpressionKind::kTuple, "", {});
  ChatExpressionPtr inside = expression_or_tuple(true);
  expect_operator(")");
  return inside;
}

ChatExpressionPtr ChatExpressionParser::named() {
  const std::string name = take().text;
  ChatExpressionPtr node = make(ChatExpressionKind::kConstant, name, {});
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    node->constant = ChatValue::flag(name == "true" || name == "True");
  } else if (name == "none" || name == "None") {
    node->constant = ChatValue::none();
  } else {
    node->kind = ChatExpressionKind::kName;
  }
  return node;
}

ChatExpressionPtr ChatExpressionParser::number() {
  const ChatToken token = take();
  ChatExpressionPtr node = make(ChatExpressionKind::kConstant, "", {});
  node->constant = token.kind == ChatTokenKind::kInteger
                       ? ChatValue::integer(parsed_number<int64_t>(token, name_))
                       : ChatValue(ChatValue::Variant(parsed_number<double>(token, name_)));
  return node;
}

ChatExpressionPtr ChatExpressionParser::strings() {
  std::string text;
  while (current().kind == ChatTokenKind::kString) text += take().text;
  ChatExpressionPtr node = make(ChatExpressionKind::kConstant, "", {});
  node->constant = ChatValue::text(std::move(text));
  return node;
}

ChatExpressionPtr ChatExpressionParser::list() {
  std::vector<ChatExpressionPtr> parts;
  expect_operator("[");
  while (!at_operator("]")) {
    if (!parts.empty()) expect_operator(",");
    if (!at_operator("]")) parts.push_back(expression());
  }
  expect_operator("]");
  return make(ChatExpressionKind::kList, "", std::move(parts));
}

ChatExpressionPtr ChatExpressionParser::mapping() {
  std::vector<ChatExpressionPtr> parts;
  expect_operator("{");
  while (!at_operator("}")) {
    if (!parts.empty()) expect_operator(",");
    if (at_operator("}")) break;
    parts.push_back(expression());
    expect_operator(":");
    parts.push_back(expression());
  }
  expect_operator("}");
  return make(ChatExpressionKind::kMapping, "", std::move(parts));
}

ChatExpressionPtr ChatExpressionParser::postfix(ChatExpressionPtr node) {
  while (at_operator(".") || at_operator("[") || at_operator("(")) {
    node = at_operator("(") ? call(std::move(node)) : subscript(std::move(node));
  }
  return node;
}

ChatExpressionPtr ChatExpressionParser::subscript(ChatExpressionPtr node) {
  if (skip_operator(".")) {
    if (current().kind == ChatTokenKind::kInteger)
      return pair(ChatExpressionKind::kItem, "", std::move(node), number());
    std::string name = expect_name();
    std::vector<ChatExpressionPtr> parts;
    parts.push_back(std::move(node));
    return make(ChatExpressionKind::kAttribute, std::move(name), std::move(parts));
  }
  expect_operator("[");
  ChatExpressionPtr first = at_operator(":") ? nullptr : expression();
  ChatExpressionPtr item = pair(at_operator(":") ? ChatExpressionKind::kSlice : ChatExpressionKind::kItem, "",
                                std::move(node), std::move(first));
  for (int i = 0; i < 2 && item->kind == ChatExpressionKind::kSlice; ++i) {
    const bool given = skip_operator(":") && !at_operator("]") && !at_operator(":");
    item->parts.push_back(given ? expression() : nullptr);
  }
  check_depth(*item);
  expect_operator("]");
  return item;
}

ChatExpressionPtr ChatExpressionParser::filtered(ChatExpressionPtr node) {
  while (true) {
    if (at_operator("|")) {
      node = filter(std::move(node));
    } else if (at_name("is")) {
      node = test(std::move(node));
    } else if (at_operator("(")) {
      node = call(std::move(node));
    } else {
      return node;
    }
  }
}

ChatExpressionPtr ChatExpressionParser::filter(ChatExpressionPtr node) {
  expect_operator("|");
  std::string name = expect_name();
  if (!is_chat_filter(name))
    refuse(fmt::format("there is no filter '{}' here; there are {}", name, join(chat_filter_names(), ", ")));
  std::vector<ChatExpressionPtr> parts;
  parts.push_back(std::move(node));
  ChatExpressionPtr made = make(ChatExpressionKind::kFilter, std::move(name), std::move(parts));
  if (at_operator("(")) made->arguments = call_arguments();
  check_depth(*made);
  return made;
}

ChatExpressionPtr ChatExpressionParser::test(ChatExpressionPtr node) {
  take();
  const bool is_negated = skip_name("not");
  std::string name = expect_name();
  if (!is_chat_test(name))
    refuse(fmt::format("there is no test '{}' here; there are {}", name, join(chat_test_names(), ", ")));
  std::vector<ChatExpressionPtr> parts;
  parts.push_back(std::move(node));
  ChatExpressionPtr made = make(ChatExpressionKind::kTest, std::move(name), std::move(parts));
  const ChatTokenKind kind = current().kind;
  const bool is_value = kind == ChatTokenKind::kString || kind == ChatTokenKind::kInteger ||
                        kind == ChatTokenKind::kFloat || at_operator("[") || at_operator("{");
  const bool is_variable =
      kind == ChatTokenKind::kName && !at_name("else") && !at_name("or") && !at_name("and");
  if (at_name("is")) refuse("tests follow each other; join them by 'and'");
  if (at_operator("(")) {
    made->arguments = call_arguments();
  } else if (is_value || is_variable) {
    made->arguments.positional.push_back(postfix(primary()));
  }
  check_depth(*made);
  if (!is_negated) return made;
  std::vector<ChatExpressionPtr> inside;
  inside.push_back(std::move(made));
  return make(ChatExpressionKind::kNot, "", std::move(inside));
}

ChatExpressionPtr ChatExpressionParser::call(ChatExpressionPtr node) {
  std::vector<ChatExpressionPtr> parts;
  parts.push_back(std::move(node));
  ChatExpressionPtr made = make(ChatExpressionKind::kCall, "", std::move(parts));
  made->arguments = call_arguments();
  check_depth(*made);
  return made;
}

ChatArguments ChatExpressionParser::call_arguments() {
  ChatArguments arguments;
  expect_operator("(");
  for (bool is_first = true; !at_operator(")"); is_first = false) {
    if (!is_first) expect_operator(",");
    if (at_operator(")")) break;
    if (at_operator("*") || at_operator("**")) refuse("arguments behind a star are not read; name each");
    if (current().kind == ChatTokenKind::kName && is(next(), ChatTokenKind::kOperator, "=")) {
      std::string name = take().text;
      take();
      arguments.named.emplace_back(std::move(name), expression());
    } else {
      if (!arguments.named.empty()) refuse("an argument without a name follows one with a name");
      arguments.positional.push_back(expression());
    }
  }
  expect_operator(")");
  return arguments;
}

}  // namespace trireme::text
