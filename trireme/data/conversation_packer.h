#pragma once
// From JSON Lines of conversations to token shards.
#include "trireme/data/conversation.h"
#include "trireme/data/packer.h"

namespace trireme::data {

/// pack() for conversations: each stays whole, within a window of `seq_len` tokens, and in one split. The
/// same bytes on any number of threads. Throws as pack() and marked_text(), and ConfigError for a file that
/// is no JSON Lines.
TokenIndex pack_conversations(const Source& source, const Tokenizer& tokenizer,
                              const ConversationFormat& format, int64_t seq_len, const PackOptions& options);

}  // namespace trireme::data
