#include "trireme/cli/kept_files.h"

#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/plan/config_files.h"
#include "trireme/plan/model_family.h"
#include "trireme/text/load.h"

namespace trireme::cli {
namespace {

std::string name_of_tokenizer(const std::string& path) {
  return text::tokenizer_name(path, text::tokenizer_digest(path));
}

}  // namespace

std::map<std::string, std::string> files_to_keep(const plan::Config& config) {
  std::map<std::string, std::string> files = plan::texts_to_keep(config);
  const std::string& path = config.data.tokenizer;
  if (path != plan::kByteTokenizer && !plan::reads_images(config.model.family))
    files[kTokenizerFile] = name_of_tokenizer(path) + "\n";
  return files;
}

void check_tokenizer(const report::RunDirectory& run, const plan::Config& config) {
  const std::string& path = config.data.tokenizer;
  const std::string kept = run.file(kTokenizerFile);
  if (path == plan::kByteTokenizer || !std::filesystem::exists(kept)) return;
  std::string trained_with = read_file(kept);
  if (trained_with.ends_with('\n')) trained_with.pop_back();
  const std::string now = name_of_tokenizer(path);
  if (trained_with == now) return;
  throw ConfigError(
      "[cli.tokenizer] {} was trained with the tokenizer {}, but data.tokenizer={} is now {}; put the file "
      "of "
      "that time back, or set data.tokenizer in {} to a copy of it with the same name",
      run.path(), trained_with, path, now, run.file("config.yaml"));
}

}  // namespace trireme::cli
