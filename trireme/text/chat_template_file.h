#pragma once
// The chat template of a model, from the files beside its tokenizer.
#include <string>

#include "trireme/text/chat_template.h"

namespace trireme::text {

/// The template in `file`, or, where that is empty, beside the tokenizer in `tokenizer`, a file or a folder:
/// chat_template.jinja, else chat_template of tokenizer_config.json, of several the one named "default".
/// Special tokens are those of tokenizer_config.json and special_tokens_map.json there. Throws ConfigError
/// where there is no template or it is not read, DataError for a damaged file, EnvironmentError for one that
/// cannot be read.
ChatTemplate load_chat_template(const std::string& file, const std::string& tokenizer);

}  // namespace trireme::text
