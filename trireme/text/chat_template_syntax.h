#pragma once
// The statements and expressions of a chat template.
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "trireme/text/chat_value.h"

namespace trireme::text {

struct ChatExpression;
using ChatExpressionPtr = std::unique_ptr<ChatExpression>;

struct ChatArguments {
  std::vector<ChatExpressionPtr> positional = {};
  std::vector<std::pair<std::string, ChatExpressionPtr>> named = {};
};

struct ChatExpression {
  enum class Kind {
    kConstant,     ///< `constant`
    kName,         ///< the variable `name`
    kList,         ///< of `parts`
    kTuple,        ///< of `parts`
    kMapping,      ///< key, value, key, value, ... in `parts`
    kAttribute,    ///< parts[0].name
    kItem,         ///< parts[0][parts[1]]
    kSlice,        ///< parts[0][parts[1]:parts[2]:parts[3]], of which all but the first may be null
    kCall,         ///< parts[0](arguments)
    kFilter,       ///< parts[0] | name(arguments)
    kTest,         ///< parts[0] is name(arguments)
    kNot,          ///< not parts[0]
    kSign,         ///< name parts[0]
    kArithmetic,   ///< parts[0] name parts[1]
    kConcat,       ///< parts[0] ~ parts[1] ~ ...
    kCompare,      ///< parts[0] names[0] parts[1] names[1] parts[2] ...
    kAnd,          ///< parts[0] and parts[1]
    kOr,           ///< parts[0] or parts[1]
    kConditional,  ///< parts[1] if parts[0] else parts[2], which may be null
  };
  Kind kind = Kind::kConstant;
  int64_t line = 0;
  int depth = 1;  ///< of the tree
  std::string name = {};
  std::vector<std::string> names = {};
  ChatValue constant = {};
  std::vector<ChatExpressionPtr> parts = {};
  ChatArguments arguments = {};
};

using ChatExpressionKind = ChatExpression::Kind;

struct ChatStatement;
using ChatStatements = std::vector<ChatStatement>;

struct ChatParameter {
  std::string name;
  ChatExpressionPtr fallback;  ///< null: it must be given
};

/// A macro of a template; calls look up what it does not define where it is defined.
struct ChatMacroSyntax {
  std::string name;
  std::vector<ChatParameter> parameters;
  std::shared_ptr<const ChatStatements> body;
};

struct ChatBranch {
  ChatExpressionPtr condition;  ///< null: else
  std::shared_ptr<const ChatStatements> body;
};

struct ChatStatement {
  enum class Kind {
    kData,        ///< `text`
    kOutput,      ///< `value`
    kIf,          ///< `branches`
    kFor,         ///< for targets in value if condition: body, else `otherwise`
    kSet,         ///< targets = value
    kSetBlock,    ///< targets = what `body` writes
    kMacro,       ///< `macro`
    kGeneration,  ///< `body`, whose text the assistant has written
    kBreak,
    kContinue,
  };
  Kind kind = Kind::kData;
  int64_t line = 0;
  std::string text = {};
  ChatExpressionPtr value = {}, condition = {};
  /// Names that are assigned to; "a.b" is the field b of the namespace a.
  std::vector<std::string> targets = {};
  std::vector<ChatBranch> branches = {};
  std::shared_ptr<const ChatStatements> body = {}, otherwise = {};
  std::shared_ptr<const ChatMacroSyntax> macro = {};
};

using ChatStatementKind = ChatStatement::Kind;

}  // namespace trireme::text
