#include "trireme/text/chat_template_evaluator.h"

#include <algorithm>
#include <array>

#include "trireme/base/error.h"
#include "trireme/text/chat_template_filters.h"
#include "trireme/text/chat_template_functions.h"
#include "trireme/text/chat_template_methods.h"
#include "trireme/text/chat_template_operators.h"

namespace trireme::text {

/// Variables of a template, a macro, a pass of a loop or a block.
struct ChatScope {
  ChatFields variables = {};
  std::shared_ptr<ChatScope> outer = {};
};

struct ChatMacro {
  std::shared_ptr<const ChatMacroSyntax> syntax;
  std::weak_ptr<ChatScope> scope;  ///< where it was defined; weak, because the scope holds the macro
};

namespace {

constexpr int kDeepestCalls = 16;

enum class Flow { kGoesOn, kBreak, kContinue };

/// Names with a meaning in Jinja2 that is not read here.
constexpr auto kUnread = std::to_array<std::string_view>(
    {"varargs", "kwargs", "caller", "self", "super", "cycler", "joiner", "lipsum"});

class Evaluator {
 public:
  Evaluator(const std::string& name, const ChatFields& variables)
      : context_(name), scope_(std::make_shared<ChatScope>(ChatScope{variables})) {}

  ChatText run(const ChatStatements& statements) {
    execute(statements);
    return std::move(written_);
  }

 private:
  /// Variables that are set while it lives are forgotten behind it.
  class Inside {
   public:
    Inside(Evaluator& evaluator, std::shared_ptr<ChatScope> outer)
        : evaluator_(evaluator), before_(evaluator.scope_) {
      evaluator.scope_ = std::make_shared<ChatScope>(ChatScope{{}, std::move(outer)});
    }
    ~Inside() { evaluator_.scope_ = before_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Evaluator& evaluator_;
    std::shared_ptr<ChatScope> before_;
  };

  Flow execute(const ChatStatements& statements) {
    for (const ChatStatement& statement : statements) {
      const Flow flow = execute(statement);
      if (flow != Flow::kGoesOn) return flow;
    }
    return Flow::kGoesOn;
  }

  Flow execute(const ChatStatement& statement) {
    context_.at(statement.line);
    context_.step();
    switch (statement.kind) {
      case ChatStatementKind::kData:
        write(statement.text);
        break;
      case ChatStatementKind::kOutput:
        write(context_.text_of(value_of(*statement.value)));
        break;
      case ChatStatementKind::kIf:
        return branch(statement);
      case ChatStatementKind::kFor:
        return loop(statement);
      case ChatStatementKind::kSet:
        assign(statement.targets, value_of(*statement.value));
        break;
      case ChatStatementKind::kSetBlock:
        assign(statement.targets, ChatValue::text(captured(*statement.body, scope_)));
        break;
      case ChatStatementKind::kMacro:
        set(statement.macro->name,
            {ChatValue::Macro{std::make_shared<const ChatMacro>(ChatMacro{statement.macro, scope_})}});
        break;
      case ChatStatementKind::kGeneration:
        generation(statement);
        break;
      case ChatStatementKind::kBreak:
        return Flow::kBreak;
      case ChatStatementKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kGoesOn;
  }

  void write(std::string_view text) {
    context_.spend(text.size());
    written_.text += text;
  }

  Flow branch(const ChatStatement& statement) {
    for (const ChatBranch& each : statement.branches) {
      if (each.condition == nullptr || value_of(*each.condition).truthy()) return execute(*each.body);
    }
    return Flow::kGoesOn;
  }

  Flow loop(const ChatStatement& statement) {
    const auto items = std::make_shared<const ChatList>(items_for(statement));
    if (items->empty()) {
      const Inside inside(*this, scope_);
      return statement.otherwise ? execute(*statement.otherwise) : Flow::kGoesOn;
    }
    for (size_t i = 0; i < items->size(); ++i) {
      const Inside inside(*this, scope_);
      context_.spend(128);
      set("loop",
          {ChatValue::Loop{std::make_shared<const ChatLoop>(ChatLoop{items, static_cast<int64_t>(i)})}});
      assign(statement.targets, (*items)[i]);
      if (execute(*statement.body) == Flow::kBreak) break;
    }
    return Flow::kGoesOn;
  }

  ChatList items_for(const ChatStatement& statement) {
    ChatList items = context_.items_of(value_of(*statement.value));
    if (!statement.condition) return items;
    ChatList kept;
    for (ChatValue& item : items) {
      const Inside inside(*this, scope_);
      assign(statement.targets, item);
      if (value_of(*statement.condition).truthy()) kept.push_back(std::move(item));
    }
    return kept;
  }

  void set(std::string_view name, ChatValue value) {
    context_.spend(scope_->variables.size());
    set_field(scope_->variables, name, std::move(value));
  }

  void assign(const std::vector<std::string>& targets, const ChatValue& value) {
    if (targets.size() == 1) return assign_one(targets[0], value);
    const ChatList parts = context_.items_of(value);
    if (parts.size() != targets.size())
      context_.refuse(fmt::format("{} names are assigned {} values", targets.size(), parts.size()));
    for (size_t i = 0; i < parts.size(); ++i) assign_one(targets[i], parts[i]);
  }

  void assign_one(const std::string& target, const ChatValue& value) {
    const size_t dot = target.find('.');
    if (dot == std::string::npos) return set(target, value);
    const ChatValue object = variable(target.substr(0, dot));
    const auto* space = object.as<ChatValue::Namespace>();
    if (space == nullptr)
      context_.refuse(
          fmt::format("a field of '{}' is assigned to, which is no namespace", target.substr(0, dot)));
    context_.spend(space->fields->size());
    set_field(*space->fields, checked_field_name(context_, target.substr(dot + 1)),
              kept_in_namespace(context_, value));
  }

  /// A part of a list or a mapping, which may become a field of a namespace.
  ChatValue part_of(const ChatExpression& expression) {
    return kept_in_namespace(context_, value_of(expression));
  }

  /// The text that `body` writes, with variables of its own inside `outer`.
  std::string captured(const ChatStatements& body, std::shared_ptr<ChatScope> outer) {
    ChatText outside = std::exchange(written_, {});
    const Inside inside(*this, std::move(outer));
    ++captures_;
    execute(body);
    --captures_;
    return std::exchange(written_, std::move(outside)).text;
  }

  void generation(const ChatStatement& statement) {
    if (captures_ > 0)
      context_.refuse("{% generation %} stands in a macro, a set block or another one; write it outside");
    const size_t begin = written_.text.size();
    const std::string text = captured(*statement.body, scope_);
    write(text);
    written_.generated.push_back({begin, begin + text.size()});
  }

  ChatValue variable(const std::string& name) {
    for (const ChatScope* scope = scope_.get(); scope != nullptr; scope = scope->outer.get()) {
      context_.spend(scope->variables.size());
      const ChatValue* found = find_field(scope->variables, name);
      if (found == nullptr) continue;
      if (found->string() != nullptr) context_.spend(found->string()->size());
      return *found;
    }
    if (is_chat_function(name)) return {ChatValue::Function{name}};
    if (std::ranges::find(kUnread, name) != kUnread.end())
      context_.refuse(fmt::format("the name {} of Jinja2 is not read", name));
    return {ChatUndefined{name}};
  }

  ChatValue value_of(const ChatExpression& node) {
    context_.at(node.line);
    context_.step();
    switch (node.kind) {
      case ChatExpressionKind::kConstant:
        if (node.constant.string() != nullptr) context_.spend(node.constant.string()->size());
        return node.constant;
      case ChatExpressionKind::kName:
        return variable(node.name);
      case ChatExpressionKind::kList:
      case ChatExpressionKind::kTuple:
        return list_of(node);
      case ChatExpressionKind::kMapping:
        return mapping_of(node);
      case ChatExpressionKind::kAttribute:
        return charged(attribute_of(context_, value_of(*node.parts[0]), node.name));
      case ChatExpressionKind::kItem:
        return item(node);
      case ChatExpressionKind::kSlice:
        return slice(node);
      case ChatExpressionKind::kCall:
        return call(node);
      case ChatExpressionKind::kFilter:
        return filtered(node);
      case ChatExpressionKind::kTest:
        return tested(node);
      case ChatExpressionKind::kNot:
        return ChatValue::flag(!value_of(*node.parts[0]).truthy());
      case ChatExpressionKind::kSign:
        return signed_value(context_, node.name, value_of(*node.parts[0]));
      case ChatExpressionKind::kArithmetic:
        return calculated(node);
      case ChatExpressionKind::kConcat:
        return concatenated(node);
      case ChatExpressionKind::kCompare:
        return compared(node);
      case ChatExpressionKind::kAnd:
      case ChatExpressionKind::kOr:
        return decided(node);
      case ChatExpressionKind::kConditional:
        return chosen(node);
    }
    return {};
  }

  ChatValue charged(ChatValue value) {
    if (value.string() != nullptr) context_.spend(value.string()->size());
    return value;
  }

  ChatValue list_of(const ChatExpression& node) {
    ChatList items;
    for (const auto& part : node.parts) items.push_back(part_of(*part));
    return context_.made_list(std::move(items), node.kind == ChatExpressionKind::kTuple);
  }

  ChatValue mapping_of(const ChatExpression& node) {
    ChatFields fields;
    for (size_t i = 0; i < node.parts.size(); i += 2) {
      const ChatValue key = value_of(*node.parts[i]);
      context_.spend(fields.size());
      set_field(fields, context_.string(key, "a key of a mapping"), part_of(*node.parts[i + 1]));
    }
    context_.spend(64 * fields.size());
    return ChatValue::mapping(std::move(fields));
  }

  ChatValue item(const ChatExpression& node) {
    const ChatValue value = value_of(*node.parts[0]);
    return charged(item_of(context_, value, value_of(*node.parts[1])));
  }

  ChatValue slice(const ChatExpression& node) {
    const ChatValue value = value_of(*node.parts[0]);
    const auto bound = [&](size_t part) -> std::optional<int64_t> {
      if (!node.parts[part]) return std::nullopt;
      const ChatValue at = value_of(*node.parts[part]);
      if (at.is<ChatValue::None>()) return std::nullopt;
      return context_.integer(at, "a slice");
    };
    return slice_of(context_, value, bound(1), bound(2), bound(3));
  }

  ChatCall call_of(const ChatArguments& arguments) {
    ChatCall made;
    for (const auto& each : arguments.positional) made.positional.push_back(value_of(*each));
    for (const auto& [name, each] : arguments.named) made.named.emplace_back(name, value_of(*each));
    return made;
  }

  ChatValue call(const ChatExpression& node) {
    const ChatExpression& callee = *node.parts[0];
    if (callee.kind == ChatExpressionKind::kAttribute) {
      const ChatValue object = value_of(*callee.parts[0]);
      if (is_chat_method(object, callee.name))
        return charged(call_chat_method(context_, object, callee.name, call_of(node.arguments)));
      return called(attribute_of(context_, object, callee.name), callee.name, node);
    }
    return called(value_of(callee), callee.name, node);
  }

  ChatValue called(const ChatValue& callee, const std::string& name, const ChatExpression& node) {
    const ChatCall given = call_of(node.arguments);
    if (const auto* macro = callee.as<ChatValue::Macro>()) return call_macro(*macro->macro, given);
    context_.at(node.line);
    const auto* function = callee.as<ChatValue::Function>();
    if (function == nullptr)
      context_.refuse(
          fmt::format("'{}' is called, but is {}; there are the functions range, namespace, dict and "
                      "raise_exception, macros, and methods of strings and mappings",
                      name, callee.type_name()));
    return call_chat_function(context_, function->name, given);
  }

  ChatValue call_macro(const ChatMacro& macro, const ChatCall& given) {
    std::shared_ptr<ChatScope> defined_in = macro.scope.lock();
    if (!defined_in)
      context_.refuse(fmt::format("the macro {} is called outside its block", macro.syntax->name));
    if (calls_ >= kDeepestCalls)
      context_.refuse(fmt::format("macros call each other more than {} deep", kDeepestCalls));
    ++calls_;
    const Inside inside(*this, std::move(defined_in));
    bind(macro, given);
    std::string text = captured(*macro.syntax->body, scope_);
    --calls_;
    return ChatValue::text(std::move(text));
  }

  void bind(const ChatMacro& macro, const ChatCall& given) {
    const auto& parameters = macro.syntax->parameters;
    if (given.positional.size() > parameters.size())
      context_.refuse(fmt::format("the macro {} takes {} arguments and gets {}", macro.syntax->name,
                                  parameters.size(), given.positional.size()));
    for (size_t i = 0; i < given.positional.size(); ++i) set(parameters[i].name, given.positional[i]);
    for (const auto& [name, value] : given.named) {
      const bool is_known =
          std::ranges::any_of(parameters, [&](const auto& each) { return each.name == name; });
      const bool is_twice = find_field(scope_->variables, name) != nullptr;
      if (!is_known || is_twice)
        context_.refuse(fmt::format("the macro {} gets '{}', which it {}", macro.syntax->name, name,
                                    is_known ? "has already" : "does not take"));
      set(name, value);
    }
    for (const ChatParameter& parameter : parameters) {
      if (find_field(scope_->variables, parameter.name) != nullptr) continue;
      set(parameter.name,
          parameter.fallback ? value_of(*parameter.fallback) : ChatValue(ChatUndefined{parameter.name}));
    }
  }

  ChatValue filtered(const ChatExpression& node) {
    const ChatValue value = value_of(*node.parts[0]);
    const ChatCall given = call_of(node.arguments);
    context_.at(node.line);
    return charged(apply_chat_filter(context_, node.name, value, given));
  }

  ChatValue tested(const ChatExpression& node) {
    const ChatValue value = value_of(*node.parts[0]);
    return ChatValue::flag(chat_test_holds(context_, node.name, value, call_of(node.arguments)));
  }

  ChatValue calculated(const ChatExpression& node) {
    const ChatValue left = value_of(*node.parts[0]), right = value_of(*node.parts[1]);
    context_.at(node.line);
    return arithmetic(context_, node.name, left, right);
  }

  ChatValue concatenated(const ChatExpression& node) {
    std::string text;
    for (const auto& part : node.parts) text += context_.text_of(value_of(*part));
    return context_.made_text(std::move(text));
  }

  ChatValue compared(const ChatExpression& node) {
    ChatValue left = value_of(*node.parts[0]);
    for (size_t i = 0; i < node.names.size(); ++i) {
      ChatValue right = value_of(*node.parts[i + 1]);
      if (!compare(context_, node.names[i], left, right)) return ChatValue::flag(false);
      left = std::move(right);
    }
    return ChatValue::flag(true);
  }

  /// As in Python, one of the two values and not whether one holds.
  ChatValue decided(const ChatExpression& node) {
    ChatValue left = value_of(*node.parts[0]);
    const bool left_decides = left.truthy() == (node.kind == ChatExpressionKind::kOr);
    return left_decides ? left : value_of(*node.parts[1]);
  }

  ChatValue chosen(const ChatExpression& node) {
    if (value_of(*node.parts[0]).truthy()) return value_of(*node.parts[1]);
    return node.parts[2] ? value_of(*node.parts[2]) : ChatValue(ChatUndefined{"the inline if without else"});
  }

  ChatContext context_;
  std::shared_ptr<ChatScope> scope_;
  ChatText written_;
  int captures_ = 0;  ///< how many set blocks, macros and generation blocks it is in
  int calls_ = 0;     ///< how many macros it is in
};

}  // namespace

ChatText run_chat_template(const ChatStatements& statements, const std::string& name,
                           const ChatFields& variables) {
  return Evaluator(name, variables).run(statements);
}

}  // namespace trireme::text
