#pragma once
// Damaged files, templates, patterns and texts: an error or a result, never a crash, and none that takes
// long. The damage is a function of the number of the execution, so that a failure repeats. Each function
// stops at the first finding, which fails the test and says its number.
#include <cstdint>

namespace trireme::text::testing {

// Files are loaded, and those that are accepted encode and decode two texts.
void fuzz_tokenizer_json(uint64_t executions);
void fuzz_gpt2_files(uint64_t executions);  ///< vocab.json and merges.txt
void fuzz_sentencepiece(uint64_t executions);
void fuzz_tiktoken(uint64_t executions);

/// Templates are read, and those that are accepted render two conversations.
void fuzz_chat_templates(uint64_t executions);
/// Regular expressions are compiled, and find their matches in two texts.
void fuzz_patterns(uint64_t executions);

/// So many texts in all are encoded and decoded, by each tokenizer in turn: of the fixtures, of GPT-2's two
/// files and of a .tiktoken. Where a tokenizer promises the text back, it must come back.
void fuzz_texts(uint64_t executions);

}  // namespace trireme::text::testing
