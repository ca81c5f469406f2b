#pragma once
#include <string>

namespace trireme::testing {

/// A tokenizer.json as Llama 2 has it, small: 636 tokens, and `</s>` ends a document.
inline const std::string kLlama2 = TRIREME_TEXT_FIXTURES "/llama2.json";

}  // namespace trireme::testing
