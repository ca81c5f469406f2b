#pragma once
// Tokenizers from files as they are found beside models.
#include <string>
#include <string_view>

#include "trireme/text/tokenizer.h"

namespace trireme::text {

/// The tokenizer in `path`: a tokenizer.json (`tokenizers`), or a folder with tokenizer.json or vocab.json
/// and merges.txt (GPT-2), which are looked for in this order. Throws ConfigError where there is none or
/// where it asks for a component that there is not, DataError where it is damaged, and EnvironmentError where
/// it cannot be read.
Tokenizer load_tokenizer(const std::string& path);

/// From a tokenizer.json.
Tokenizer tokenizer_from_json(const std::string& path);

/// GPT-2's tokenizer (Radford et al. 2019).
Tokenizer tokenizer_from_gpt2(const std::string& vocab_path, const std::string& merges_path);

/// SentencePiece's .model of type unigram or BPE. Throws ConfigError for other types and for what is not
/// read: user-defined and unused symbols, and spaces as suffixes or not escaped.
Tokenizer tokenizer_from_sentencepiece(const std::string& path);

/// tiktoken's file of bytes in base64 with their ranks; it has no special tokens. `pattern` is the name of
/// the expression that cuts words: gpt2, cl100k, o200k, llama3 or qwen. Throws ConfigError for another one.
Tokenizer tokenizer_from_tiktoken(const std::string& path, std::string_view pattern);

}  // namespace trireme::text
