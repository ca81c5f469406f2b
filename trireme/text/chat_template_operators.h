#pragma once
// Operators of a chat template on values, with the meaning that Python gives to them.
#include <optional>
#include <string_view>

#include "trireme/text/chat_template_context.h"

namespace trireme::text {

/// `left name right` for + - * / // and %.
ChatValue arithmetic(ChatContext& context, std::string_view name, const ChatValue& left,
                     const ChatValue& right);
ChatValue signed_value(ChatContext& context, std::string_view sign, const ChatValue& value);
/// `left name right` for comparisons, `in` and `not in`.
bool compare(ChatContext& context, std::string_view name, const ChatValue& left, const ChatValue& right);
bool less(ChatContext& context, const ChatValue& left, const ChatValue& right);

/// value.name, or undefined.
ChatValue attribute_of(ChatContext& context, const ChatValue& value, const std::string& name);
/// value[key], or undefined.
ChatValue item_of(ChatContext& context, const ChatValue& value, const ChatValue& key);
/// value[begin:end:step], or undefined.
ChatValue slice_of(ChatContext& context, const ChatValue& value, std::optional<int64_t> begin,
                   std::optional<int64_t> end, std::optional<int64_t> step);

/// Finds `part` in `text` from `begin` on, as work that counts.
size_t find_text(ChatContext& context, std::string_view text, std::string_view part, size_t begin = 0);

/// A pass of a loop.
struct ChatLoop {
  std::shared_ptr<const ChatList> items;
  int64_t index = 0;  ///< from 0 on
};

}  // namespace trireme::text
