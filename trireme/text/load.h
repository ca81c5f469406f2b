#pragma once
// Tokenizers from files as they are found beside models.
#include <string>
#include <string_view>
#include <vector>

#include "trireme/text/tokenizer.h"

namespace trireme::text {

/// The tokenizer in `path`: a tokenizer.json (`tokenizers`), a SentencePiece .model, a published
/// .tiktoken file, or a folder with
/// tokenizer.json, tokenizer.model or vocab.json and merges.txt (GPT-2), which are looked for in this order.
/// Throws ConfigError where there is none or where it asks for a component that there is not, DataError where
/// it is damaged, and EnvironmentError where it cannot be read.
Tokenizer load_tokenizer(const std::string& path);

/// The files that load_tokenizer() reads. Throws ConfigError where there are none.
std::vector<std::string> tokenizer_files(const std::string& path);

/// XXH3-64 of the contents of tokenizer_files(), in hexadecimal: other tokenizers have other ones. Names do
/// not count, but for that of a .tiktoken file, which says as much about its tokens as its contents.
std::string tokenizer_digest(const std::string& path);

/// "gpt2.json (0123456789abcdef)": the last part of the path, and the digest.
std::string tokenizer_name(const std::string& path, const std::string& digest);

/// The special token that ends a document. Files do not say which one does, so it is known by its usual
/// names. Throws ConfigError where there is none of them.
int32_t end_token(const Tokenizer& tokenizer);

/// Whether a special token with this text is taken for the one that ends a document.
bool ends_documents(std::string_view token);

/// From a tokenizer.json.
Tokenizer tokenizer_from_json(const std::string& path);

/// GPT-2's tokenizer (Radford et al. 2019).
Tokenizer tokenizer_from_gpt2(const std::string& vocab_path, const std::string& merges_path);

/// SentencePiece's .model of type unigram or BPE. Throws ConfigError for other types and for what is not
/// read: unused symbols, and spaces as suffixes or not escaped.
Tokenizer tokenizer_from_sentencepiece(const std::string& path);

/// tiktoken's file of bytes in base64 with their ranks; it has no special tokens. `pattern` is the name of
/// the expression that cuts words: gpt2, cl100k, o200k, llama3 or qwen. Throws ConfigError for another one.
Tokenizer tokenizer_from_tiktoken(const std::string& path, std::string_view pattern);

/// The same with the expression and the special tokens that belong to the file's name: r50k_base.tiktoken
/// (GPT-2's), p50k_base, cl100k_base, o200k_base or qwen. Throws ConfigError for another name.
Tokenizer tokenizer_from_tiktoken(const std::string& path);

}  // namespace trireme::text
