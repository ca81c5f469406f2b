#pragma once
// A folder that is there with all that belongs in it, or not at all.
#include <string>

#include "trireme/checkpoint/folder.h"
#include "trireme/checkpoint/unfinished.h"

namespace trireme::checkpoint {

class NewFolder {
 public:
  /// Makes a folder beside `path` to write to, as Unfinished does. `replaces`: commit() may replace a folder
  /// at `path` that holds files alone. Throws EnvironmentError when there is anything else at `path`,
  /// ConfigError when `path` ends in no name.
  NewFolder(const std::string& path, bool replaces);

  const Folder& folder() const { return folder_; }
  /// Gives the folder its name `path`, which survives a power failure once this returns. To be called once,
  /// after its files were finished.
  void commit();

 private:
  std::string path_;
  bool replaces_;
  Unfinished unfinished_;  ///< removed with this, unless it was committed
  Folder folder_;
};

}  // namespace trireme::checkpoint
