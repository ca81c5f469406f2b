#pragma once
// Files that a config names and a run keeps copies of, since they may go or change.
#include <map>
#include <string>
#include <vector>

#include "trireme/plan/config.h"

namespace trireme::plan {

struct ConfigFile {
  const char* key;      ///< "pipeline.file"
  const char* kept_as;  ///< name of the copy in a run's directory: "schedule.csv"
  std::string& (*path)(Config& config);
  /// Its text: of a schedule the passes alone, of programs every byte; empty: config names no file, or does
  /// not use it. Throws ConfigError when it cannot be read.
  std::string (*text)(const Config& config);
};
const std::vector<ConfigFile>& config_files();

/// Texts of those that `config` names, by the names of the copies.
std::map<std::string, std::string> texts_to_keep(const Config& config);

}  // namespace trireme::plan
