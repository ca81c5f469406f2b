#include "trireme/text/load.h"

#include <filesystem>

#include "trireme/base/error.h"

namespace trireme::text {
namespace {

namespace fs = std::filesystem;

Tokenizer load_folder(const fs::path& folder) {
  const auto has = [&](const char* name) { return fs::exists(folder / name); };
  if (has("tokenizer.json")) return tokenizer_from_json((folder / "tokenizer.json").string());
  if (has("tokenizer.model")) return tokenizer_from_sentencepiece((folder / "tokenizer.model").string());
  if (has("vocab.json") && has("merges.txt")) {
    return tokenizer_from_gpt2((folder / "vocab.json").string(), (folder / "merges.txt").string());
  }
  throw ConfigError(
      "[text.load] {} has no tokenizer.json, no tokenizer.model and not both vocab.json and merges.txt; name "
      "a folder or a file "
      "with a tokenizer",
      folder.string());
}

}  // namespace

Tokenizer load_tokenizer(const std::string& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw ConfigError("[text.load] there is no {}; name a tokenizer.json or a folder with a tokenizer", path);
  }
  if (fs::is_directory(path, ignored)) return load_folder(path);
  return path.ends_with(".model") ? tokenizer_from_sentencepiece(path) : tokenizer_from_json(path);
}

}  // namespace trireme::text
