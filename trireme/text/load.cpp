#include "trireme/text/load.h"

#include <algorithm>
#include <array>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/text.h"
#include "trireme/text/json_view.h"

namespace trireme::text {
namespace {

namespace fs = std::filesystem;

/// The end tokens of GPT-2 and Qwen; Llama 2 and Mistral; Llama 3; Gemma.
constexpr auto kEndTokens =
    std::to_array<std::string_view>({"<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>"});

std::vector<std::string> files_in(const fs::path& folder) {
  const auto has = [&](const char* name) { return fs::exists(folder / name); };
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    if (has(name)) return {(folder / name).string()};
  }
  if (has("vocab.json") && has("merges.txt"))
    return {(folder / "vocab.json").string(), (folder / "merges.txt").string()};
  throw ConfigError(
      "[text.load] {} has no tokenizer.json, no tokenizer.model and not both vocab.json and merges.txt; name "
      "a folder or a file with a tokenizer",
      folder.string());
}

/// The name of such a file decides how words are cut, and which special tokens there are.
bool is_tiktoken(std::string_view file) {
  return file.ends_with(".tiktoken");
}

}  // namespace

std::vector<std::string> tokenizer_files(const std::string& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw ConfigError("[text.load] there is no {}; name a tokenizer.json or a folder with a tokenizer", path);
  }
  if (fs::is_directory(path, ignored)) return files_in(path);
  return {path};
}

Tokenizer load_tokenizer(const std::string& path) {
  const std::vector<std::string> files = tokenizer_files(path);
  if (files.size() == 2) return tokenizer_from_gpt2(files[0], files[1]);
  if (is_tiktoken(files[0])) return tokenizer_from_tiktoken(files[0]);
  return files[0].ends_with(".model") ? tokenizer_from_sentencepiece(files[0])
                                      : tokenizer_from_json(files[0]);
}

std::string tokenizer_digest(const std::string& path) {
  StreamingHash hash;
  const auto add = [&hash](const std::string& bytes) {
    const uint64_t size = bytes.size();  // so that two files do not run into each other
    hash.update(&size, sizeof size);
    hash.update(bytes.data(), bytes.size());
  };
  for (const std::string& file : tokenizer_files(path)) {
    if (is_tiktoken(file)) add(fs::path(file).stem().string());
    add(read_bounded(file));
  }
  return hex64(hash.digest());
}

std::string tokenizer_name(const std::string& path, const std::string& digest) {
  const fs::path given = path;
  const fs::path last = given.has_filename() ? given.filename() : given.parent_path().filename();
  return fmt::format("{} ({})", last.string(), digest);
}

bool ends_documents(std::string_view token) {
  return std::ranges::find(kEndTokens, token) != kEndTokens.end();
}

int32_t end_token(const Tokenizer& tokenizer) {
  for (const std::string_view name : kEndTokens) {
    if (const auto id = tokenizer.find_special(name)) return *id;
  }
  throw ConfigError(
      "[text.load] {} has no special token that ends a document, which is one of {}; add one to its "
      "added_tokens with \"special\": true, or choose another tokenizer",
      tokenizer.name(), join(std::vector<std::string>(kEndTokens.begin(), kEndTokens.end()), ", "));
}

}  // namespace trireme::text
