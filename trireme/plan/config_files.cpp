#include "trireme/plan/config_files.h"

#include "trireme/plan/given_program.h"
#include "trireme/plan/pipeline.h"

namespace trireme::plan {

const std::vector<ConfigFile>& config_files() {
  static const std::vector<ConfigFile> files = {
      {.key = "pipeline.file",
       .kept_as = "schedule.csv",
       .path = [](Config& config) -> std::string& { return config.pipeline.file; },
       .text = schedule_text},
      {.key = "train.step_program",
       .kept_as = "step_program.txt",
       .path = [](Config& config) -> std::string& { return config.train.step_program; },
       .text = given_text}};
  return files;
}

std::map<std::string, std::string> texts_to_keep(const Config& config) {
  std::map<std::string, std::string> texts;
  for (const ConfigFile& file : config_files()) {
    if (std::string text = file.text(config); !text.empty()) texts[file.kept_as] = std::move(text);
  }
  return texts;
}

}  // namespace trireme::plan
