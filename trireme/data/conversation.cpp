#include "trireme/data/conversation.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"

namespace trireme::data {
namespace {

using Json = nlohmann::ordered_json;
using text::ChatText;
using text::Span;

constexpr auto kPromptNames = std::to_array<std::string_view>({"prompt", "question"});
constexpr auto kAnswerNames = std::to_array<std::string_view>({"answer", "completion", "response"});
constexpr auto kRoles = std::to_array<std::string_view>({"system", "developer", "user", "assistant", "tool"});
/// Roles as ShareGPT names them, and as templates know them.
struct Speaker {
  std::string_view from, role;
};
constexpr Speaker kSpeakers[] = {{"system", "system"}, {"human", "user"},          {"user", "user"},
                                 {"gpt", "assistant"}, {"assistant", "assistant"}, {"tool", "tool"}};
constexpr int kDeepestRecord = 64;

[[noreturn]] void refuse_record(const std::string& place, std::string_view problem) {
  throw DataError("[data.conversation] {}: {}; correct the line or take it out", place, problem);
}

std::string quoted_names(std::span<const std::string_view> names) {
  std::vector<std::string> words;
  for (const std::string_view name : names) words.push_back(fmt::format("'{}'", name));
  return join(words, ", ");
}

const std::string& text_field(const Json& object, std::string_view name, const std::string& place) {
  const Json& value = object[std::string(name)];
  if (!value.is_string())
    refuse_record(place, fmt::format("'{}' is {}, not a string", name, value.type_name()));
  return value.get_ref<const std::string&>();
}

/// The value of the one of `names` that the record has.
const std::string& one_of_fields(const Json& record, std::span<const std::string_view> names,
                                 const std::string& place) {
  for (const std::string_view name : names) {
    if (record.contains(std::string(name))) return text_field(record, name, place);
  }
  refuse_record(place, fmt::format("it has none of the fields {}", quoted_names(names)));
}

Json parsed_record(std::string_view record, const std::string& place) {
  bool too_deep = false;
  const auto bounds = [&too_deep](int depth, Json::parse_event_t, Json&) {
    too_deep = too_deep || depth > kDeepestRecord;
    return !too_deep;
  };
  Json json = Json::parse(record, bounds, false);
  if (too_deep) refuse_record(place, fmt::format("it is nested more than {} deep", kDeepestRecord));
  if (json.is_discarded()) refuse_record(place, "it is no JSON");
  if (!json.is_object()) refuse_record(place, "it is no JSON object");
  return json;
}

bool calls_tools(const Json& message) {
  return message.contains("tool_calls") && !message["tool_calls"].empty();
}

void check_message(const Json& message, const std::string& place) {
  if (!message.is_object()) refuse_record(place, "a message is no object with role and content");
  if (!message.contains("role")) refuse_record(place, "a message has no 'role'");
  const std::string& role = text_field(message, "role", place);
  if (std::ranges::find(kRoles, role) == kRoles.end())
    refuse_record(place, fmt::format("the role '{}' is unknown; there are {}", printable_line(role),
                                     quoted_names(kRoles)));
  if (!message.contains("content") && !calls_tools(message))
    refuse_record(place, "a message has no 'content'");
  const bool is_empty = role == "assistant" && !calls_tools(message) &&
                        (message["content"].is_null() || message["content"] == "");
  if (is_empty) refuse_record(place, "an answer is empty");
}

/// A turn of ShareGPT.
Json message_of_turn(const Json& turn, const std::string& place) {
  if (!turn.is_object() || !turn.contains("from") || !turn.contains("value"))
    refuse_record(place, "a turn of 'conversations' has no 'from' and 'value'");
  const std::string& from = text_field(turn, "from", place);
  const auto* const found =
      std::ranges::find_if(kSpeakers, [&](const auto& speaker) { return speaker.from == from; });
  if (found == std::end(kSpeakers))
    refuse_record(place,
                  fmt::format("'from' is '{}'; system, human, gpt and tool are known", printable_line(from)));
  return {{"role", found->role}, {"content", text_field(turn, "value", place)}};
}

Json messages_of(const Json& record, const std::string& place) {
  Json messages = Json::array();
  const char* const name = record.contains("messages") ? "messages" : "conversations";
  if (!record.contains(name)) {
    messages.push_back({{"role", "user"}, {"content", one_of_fields(record, kPromptNames, place)}});
    messages.push_back({{"role", "assistant"}, {"content", one_of_fields(record, kAnswerNames, place)}});
  } else if (!record[name].is_array() || record[name].empty()) {
    refuse_record(place, fmt::format("'{}' is no list of turns, or an empty one", name));
  } else {
    for (const Json& each : record[name])
      messages.push_back(record.contains("messages") ? each : message_of_turn(each, place));
  }
  for (const Json& message : messages) check_message(message, place);
  return messages;
}

/// Template and line of the data are in the message.
ChatText rendered(const ConversationFormat& format, const Json& messages, bool prompts,
                  const std::string& place) {
  try {
    return format.chat->render(messages, prompts);
  } catch (const ConfigError& error) {
    throw ConfigError("{}; it renders {}", error.what(), place);
  }
}

/// Where the answer in `messages`[index] stands: a template writes the same up to it with what follows and
/// without, or it cannot be told.
Span answer_span(const ConversationFormat& format, const Json& messages, size_t index,
                 const std::string& whole, const std::string& place) {
  const auto end = messages.begin() + static_cast<std::ptrdiff_t>(index);
  const Json before(std::vector<Json>(messages.begin(), end));
  const Json with(std::vector<Json>(messages.begin(), end + 1));
  const std::string asked = rendered(format, before, true, place).text;
  const std::string answered =
      index + 1 == messages.size() ? whole : rendered(format, with, false, place).text;
  if (answered.starts_with(asked) && whole.starts_with(answered)) return {asked.size(), answered.size()};
  throw ConfigError(
      "[data.conversation] {}: {} renders the turns up to answer {} otherwise when the answer or later turns "
      "follow, so "
      "that it cannot be told where the answer stands; put {{% generation %}} and {{% endgeneration %}} "
      "around answers "
      "in a copy of the template and name it by data.chat_template, or set data.loss_on=all",
      place, format.chat->name(), index);
}

std::vector<Span> answer_spans(const ConversationFormat& format, const Json& messages, const ChatText& whole,
                               const std::string& place) {
  if (!whole.generated.empty()) return whole.generated;
  std::vector<Span> spans;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i]["role"] == "assistant")
      spans.push_back(answer_span(format, messages, i, whole.text, place));
  }
  if (spans.empty()) refuse_record(place, "it has no answer of the assistant");
  return spans;
}

std::string with_marks(const std::string& text, const std::vector<Span>& spans) {
  std::string marked;
  size_t done = 0;
  for (const Span& span : spans) {
    marked.append(text, done, span.begin - done) += MarkedText::kBegin;
    marked.append(text, span.begin, span.size()) += MarkedText::kEnd;
    done = span.end;
  }
  return marked.append(text, done);
}

MarkedText marked_pair(const ConversationFormat& format, const Json& record, const std::string& place) {
  const std::string& prompt = one_of_fields(record, kPromptNames, place);
  const std::string& answer = one_of_fields(record, kAnswerNames, place);
  if (answer.empty()) refuse_record(place, "the answer is empty");
  const size_t begin = format.loss_on == plan::LossOn::kAll ? 0 : prompt.size();
  return {with_marks(prompt + answer, {{begin, prompt.size() + answer.size()}}) + MarkedText::kEndToken};
}

MarkedText marked_chat(const ConversationFormat& format, const Json& record, const std::string& place) {
  const Json messages = messages_of(record, place);
  const ChatText whole = rendered(format, messages, false, place);
  if (format.loss_on == plan::LossOn::kAll) return {with_marks(whole.text, {{0, whole.text.size()}})};
  return {with_marks(whole.text, answer_spans(format, messages, whole, place))};
}

bool is_mark(char byte) {
  return byte == MarkedText::kBegin || byte == MarkedText::kEnd || byte == MarkedText::kEndToken;
}

/// A text without its marks, and where they stood.
struct Unmarked {
  std::string text;
  std::vector<Span> spans;
  bool has_end_token = false;
};

Unmarked unmarked(std::string_view marked) {
  Unmarked result;
  for (const char byte : marked) {
    if (byte == MarkedText::kBegin) result.spans.push_back({result.text.size(), 0});
    if (byte == MarkedText::kEnd) result.spans.back().end = result.text.size();
    result.has_end_token = result.has_end_token || byte == MarkedText::kEndToken;
    if (!is_mark(byte)) result.text += byte;
  }
  return result;
}

/// The token of `ids`, which are those of `text`, that holds the byte at `place`: one that reaches over it
/// differs from the ids of the text before it.
size_t token_at(const Tokenizer& tokenizer, const std::string& text, const std::vector<int32_t>& ids,
                size_t place) {
  if (place == 0) return 0;
  if (place == text.size()) return ids.size();
  if (tokenizer.cuts_anywhere()) return place;
  const std::vector<int32_t> before = tokenizer.encode(std::string_view(text).substr(0, place));
  return static_cast<size_t>(std::ranges::mismatch(ids, before).in1 - ids.begin());
}

}  // namespace

std::string MarkedText::plain() const {
  return unmarked(text).text;
}

MarkedText marked_text(const ConversationFormat& format, std::string_view record, const std::string& place) {
  const Json json = parsed_record(record, place);
  return format.format == plan::DataFormat::kChat ? marked_chat(format, json, place)
                                                  : marked_pair(format, json, place);
}

std::vector<int32_t> encode_marked(const Tokenizer& tokenizer, std::string_view marked) {
  const Unmarked given = unmarked(marked);
  const auto mark = static_cast<int32_t>(tokenizer.vocab_size());
  const std::vector<int32_t> ids = tokenizer.encode(given.text);
  std::vector<int32_t> result = ids;
  for (const Span& span : given.spans) {
    const size_t begin = token_at(tokenizer, given.text, ids, span.begin);
    // A token that reaches over the end of an answer is of what follows, unless it is all that there is.
    const size_t end = token_at(tokenizer, given.text, ids, span.end);
    for (size_t i = begin; i < std::min(end + (end == begin ? 1 : 0), ids.size()); ++i)
      result[i] = ids[i] + mark;
  }
  if (given.has_end_token) result.push_back(tokenizer.document_separator() + mark);
  return result;
}

}  // namespace trireme::data
