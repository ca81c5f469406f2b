#pragma once
// Small token folders for tests, and reading them back whole.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/data/dataset.h"
#include "trireme/data/shard.h"

namespace trireme::testing {

/// Writes `tokens` as the training split of `folder`, which must exist; validation stays empty.
inline data::TokenIndex write_tokens(const std::string& folder, const std::vector<int32_t>& tokens,
                                     const data::SplitFormat& format) {
  data::SplitWriter writer(folder, "train", format);
  writer.append(tokens);
  data::TokenIndex index{
      .tokenizer = "test", .vocab_size = format.vocab_size, .source = "test", .splits = {}};
  index.splits["train"] = writer.finish();
  index.splits["val"] = {};
  data::write_index(folder, index);
  return index;
}

/// All tokens of a split of at least two tokens.
inline std::vector<int64_t> read_tokens(const std::string& folder, const std::string& split) {
  const int64_t count = data::Dataset(folder, split, 1).tokens();
  if (count < 2) return {};
  std::vector<int64_t> tokens(static_cast<size_t>(count));
  data::Dataset(folder, split, count - 1).read(0, tokens);
  return tokens;
}

/// The same, of byte tokens.
inline std::string read_text(const std::string& folder, const std::string& split) {
  std::string text;
  for (const int64_t token : read_tokens(folder, split)) text += static_cast<char>(token);
  return text;
}

}  // namespace trireme::testing
