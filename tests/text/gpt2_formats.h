#pragma once
// The vocabulary of a byte-level tokenizer.json in the two other formats that it is published in.
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace trireme::text::testing {

/// The merges of "model" as merges.txt has them.
std::string merges_txt_of(const nlohmann::json& model);
/// The vocabulary of "model", without <|endoftext|>, as a .tiktoken file.
std::string ranks_of_tiktoken(const nlohmann::json& model);

}  // namespace trireme::text::testing
