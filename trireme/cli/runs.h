#pragma once
// Runs by the words that people use for them: a folder, the name of a run, "latest".
#include <functional>
#include <string>

#include "trireme/report/run_dir.h"

namespace trireme::cli {

/// The part that a command needs of a run.
struct Wanted {
  std::string what;  ///< "weights"
  std::string file;  ///< relative to the run directory
  /// Whether it is there, where that is not for `file` alone to say.
  std::function<bool(const report::RunDirectory&)> is_there = {};
  /// Why a run is passed over though that is there; empty: it is not. A run that is named by its folder is
  /// taken all the same.
  std::function<std::string(const report::RunDirectory&)> why_not = {};
};

/// The run that `word` names: the path of a run directory, its folder name below `root`, the name it was
/// given by --name, or "latest". If several have that name, and for "latest", the newest that has what is
/// wanted; the log says which newer ones were passed over, and why. One that cannot be read is named, and
/// keeps nobody from the others. Throws ConfigError, with real folders, when there is none, and when `word`
/// is empty.
report::RunDirectory find_run(const std::string& word, const std::string& root, const Wanted& wanted);

/// Throws ConfigError for a page that cannot be written to `path`: a folder, or one in a folder that is not
/// there. Empty: it goes to a run's directory.
void check_page_path(const std::string& path);

}  // namespace trireme::cli
