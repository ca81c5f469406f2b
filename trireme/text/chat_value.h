#pragma once
// Values that a chat template computes with, with the meaning that Python gives to them.
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace trireme::text {

class ChatValue;
struct ChatMacro;
struct ChatLoop;

/// The value of a name that nothing defined. `name` is for messages.
struct ChatUndefined {
  std::string name = {};
};

using ChatList = std::vector<ChatValue>;
/// In the order in which keys were set.
using ChatFields = std::vector<std::pair<std::string, ChatValue>>;

/// Lists and mappings are shared and never change once they are part of a value.
class ChatValue {
 public:
  struct Mapping {
    std::shared_ptr<const ChatFields> fields;
    int depth = 1;  ///< how deep lists and mappings are in each other
  };
  /// A value of `namespace()`, the only one that assignments change.
  struct Namespace {
    std::shared_ptr<ChatFields> fields;
  };
  struct List {
    std::shared_ptr<const ChatList> items;
    bool is_tuple = false;
    int depth = 1;
  };
  struct Macro {
    std::shared_ptr<const ChatMacro> macro;
  };
  struct Loop {
    std::shared_ptr<const ChatLoop> loop;
  };
  /// A function of the interpreter, such as range.
  struct Function {
    std::string name;
  };
  using None = std::monostate;
  using Variant = std::variant<ChatUndefined, None, bool, int64_t, double, std::string, List, Mapping,
                               Namespace, Macro, Loop, Function>;

  ChatValue() : value_(ChatUndefined{}) {}
  ChatValue(Variant value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)

  static ChatValue none() { return {None{}}; }
  static ChatValue text(std::string value) { return {Variant(std::move(value))}; }
  static ChatValue integer(int64_t value) { return {Variant(value)}; }
  static ChatValue flag(bool value) { return {Variant(value)}; }
  /// Both throw ConfigError where they would be nested more than 64 deep.
  static ChatValue list(ChatList items, bool is_tuple = false);
  static ChatValue mapping(ChatFields fields);

  template <typename Type>
  const Type* as() const {
    return std::get_if<Type>(&value_);
  }
  template <typename Type>
  bool is() const {
    return std::holds_alternative<Type>(value_);
  }
  bool is_undefined() const { return is<ChatUndefined>(); }
  const std::string* string() const { return as<std::string>(); }
  const ChatList* items() const { return is<List>() ? as<List>()->items.get() : nullptr; }
  /// The fields of a mapping.
  const ChatFields* fields() const { return is<Mapping>() ? as<Mapping>()->fields.get() : nullptr; }
  const Variant& variant() const { return value_; }

  /// The depth to which lists and mappings are in each other here: 0 where there are none.
  int depth() const;
  /// Whether `if` takes it for true.
  bool truthy() const;
  /// "string", "mapping", "undefined", ... for messages.
  std::string_view type_name() const;

 private:
  Variant value_;
};

/// The value of the field `name`, or null.
const ChatValue* find_field(const ChatFields& fields, std::string_view name);
/// Sets or adds it.
void set_field(ChatFields& fields, std::string_view name, ChatValue value);

/// The value that a JSON value means. Throws ConfigError where it is nested more than 64 deep.
ChatValue chat_value_of(const nlohmann::ordered_json& json);

/// Whether Python's `==` holds; numbers and truth values compare with each other.
bool equal(const ChatValue& left, const ChatValue& right);

/// The shortest decimal number that reads back as `value`, as Python's repr() writes it.
std::string python_float(double value);

/// The number of code points in `text`, and those from `begin` on before `end`, both in the text.
int64_t count_code_points(std::string_view text);
std::string_view code_points(std::string_view text, int64_t begin, int64_t end);

}  // namespace trireme::text
