#pragma once
// Prompts with answers, and conversations, as text in which it is marked what the model is to learn.
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/data/tokenizer.h"
#include "trireme/plan/choices.h"
#include "trireme/text/chat_template.h"

namespace trireme::data {

struct ConversationFormat {
  plan::DataFormat format = plan::DataFormat::kChat;
  plan::LossOn loss_on = plan::LossOn::kAnswers;
  std::shared_ptr<const text::ChatTemplate> chat = {};  ///< of kChat
  bool keeps_apart = false;                             ///< shards say where conversations begin
};

/// `text` is UTF-8; bytes that stand in no UTF-8 are around what counts in the loss, and at the end of a text
/// that the token which ends documents follows.
struct MarkedText {
  static constexpr char kBegin = '\xfe', kEnd = '\xff', kEndToken = '\xfd';
  std::string text;
  /// Without the marks.
  std::string plain() const;
};

/// What `record`, a JSON object, says in the format; `place` ("FILE, line N") is for messages. A record has a
/// prompt ("prompt" or "question") and an answer ("answer", "completion" or "response"), or, of kChat, turns:
/// "messages" with role and content, or "conversations" with from and value. Throws DataError where a field
/// is missing or of another type, a role is unknown or an answer is empty, and ConfigError where the template
/// refuses the conversation, or does not show where an answer begins.
MarkedText marked_text(const ConversationFormat& format, std::string_view record, const std::string& place);

/// The ids of the text as a whole; those of which a part counts are larger by the vocabulary's size.
std::vector<int32_t> encode_marked(const Tokenizer& tokenizer, std::string_view marked);

}  // namespace trireme::data
