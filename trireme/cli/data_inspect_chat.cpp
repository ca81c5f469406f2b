#include "trireme/cli/data_inspect_chat.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "trireme/base/cores.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/cli/corpus_text.h"
#include "trireme/cli/words.h"
#include "trireme/data/conversation.h"
#include "trireme/data/encode_ahead.h"
#include "trireme/data/json_lines.h"
#include "trireme/text/chat_template_file.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct FoundConversations {
  int64_t files = 0, conversations = 0, tokens = 0, counted = 0;
  int64_t longer = 0, longest = 0;  ///< than a window; in tokens
  std::string first;                ///< marked
};

class ConversationInspector {
 public:
  ConversationInspector(const plan::DataConfig& config, const data::Tokenizer& tokenizer)
      : seq_len_(config.seq_len),
        vocab_size_(static_cast<int32_t>(tokenizer.vocab_size())),
        format_{.format = config.format, .loss_on = config.loss_on, .chat = {}},
        encode_(
            tokenizer, usable_cores(), [] {}, data::encode_marked) {
    if (config.format == plan::DataFormat::kChat)
      format_.chat = std::make_shared<const text::ChatTemplate>(
          text::load_chat_template(config.chat_template, config.tokenizer));
  }

  FoundConversations run(const data::Source& source) {
    for (const data::SourceFile& file : source.files) {
      if (!data::is_json_lines(file.name)) continue;
      ++found_.files;
      data::JsonLines records(source.path_of(file), "", [] {});
      while (const auto record = records.next_record())
        add(*record, fmt::format("{}, line {}", source.path_of(file), records.line()));
    }
    encode_.finish();
    return std::move(found_);
  }

 private:
  void add(std::string_view record, const std::string& place) {
    const data::MarkedText marked = data::marked_text(format_, record, place);
    if (found_.first.empty()) found_.first = marked.text;
    encode_.add(marked.text, [this](std::span<const int32_t> ids) {
      const auto tokens = static_cast<int64_t>(ids.size());
      found_.conversations += 1;
      found_.tokens += tokens;
      found_.counted += std::ranges::count_if(ids, [this](int32_t id) { return id >= vocab_size_; });
      found_.longer += tokens > seq_len_ ? 1 : 0;
      found_.longest = std::max(found_.longest, tokens);
    });
  }

  int64_t seq_len_;
  int32_t vocab_size_;
  data::ConversationFormat format_;
  FoundConversations found_;
  data::EncodeAhead encode_;  // last: it stops before what takes its ids goes
};

/// The text with >>> and <<< around what counts.
std::string shown_marks(const std::string& marked) {
  std::string shown;
  for (const char byte : marked) {
    if (byte == data::MarkedText::kBegin) {
      shown += ">>>";
    } else if (byte == data::MarkedText::kEnd) {
      shown += "<<<";
    } else if (byte != data::MarkedText::kEndToken) {
      shown += byte;
    }
  }
  return shown;
}

void print_conversations(const FoundConversations& found, const plan::DataConfig& config) {
  const double share =
      static_cast<double>(found.counted) / static_cast<double>(std::max<int64_t>(1, found.tokens));
  fmt::print("text       {}, {}\n", counted(found.files, "file"),
             counted(found.conversations, "conversation"));
  fmt::print("tokens     {}, {} of them count in the loss ({})\n", with_commas(found.tokens),
             with_commas(found.counted), percent(share));
  fmt::print("longest    {}; {} longer than data.seq_len={}\n", counted(found.longest, "token"),
             counted(found.longer, "conversation") + (found.longer == 1 ? " is" : " are"), config.seq_len);
  fmt::print("first      what counts stands between >>> and <<<\n{}\n", printable(shown_marks(found.first)));
}

void print_conversations_json(const FoundConversations& found, const plan::DataConfig& config) {
  const Json document = {{"schema", "trireme.conversations/1"},
                         {"files", found.files},
                         {"conversations", found.conversations},
                         {"tokens", found.tokens},
                         {"counted", found.counted},
                         {"longest", found.longest},
                         {"seq_len", config.seq_len},
                         {"longer", found.longer},
                         {"first", shown_marks(found.first)}};
  fmt::print("{}\n", document.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace

void inspect_conversations(const std::string& path, const plan::DataConfig& config,
                           const data::Tokenizer& tokenizer, bool json) {
  const FoundConversations found = ConversationInspector(config, tokenizer).run(source_of(path));
  if (found.conversations == 0)
    throw ConfigError(
        "[cli.data] {} has no conversations; name a JSON Lines file (*.jsonl) with a record a line", path);
  (json ? print_conversations_json : print_conversations)(found, config);
}

}  // namespace trireme::cli
