#include "trireme/cli/kept_files.h"

#include "trireme/plan/config_files.h"
#include "trireme/plan/model_family.h"
#include "trireme/text/load.h"

namespace trireme::cli {

std::map<std::string, std::string> files_to_keep(const plan::Config& config) {
  std::map<std::string, std::string> files = plan::texts_to_keep(config);
  const std::string& path = config.data.tokenizer;
  if (path != plan::kByteTokenizer && !plan::reads_images(config.model.family))
    files[kTokenizerFile] = text::tokenizer_name(path, text::tokenizer_digest(path)) + "\n";
  return files;
}

}  // namespace trireme::cli
