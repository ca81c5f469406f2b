#pragma once
// A folder that is there with all that belongs in it, or not at all.
#include <string>

#include "trireme/checkpoint/folder.h"

namespace trireme::checkpoint {

class NewFolder {
 public:
  /// Makes a folder beside `path` to write to, under a name of its own. `replaces`: commit() may replace a
  /// folder at `path` that holds files alone. Throws EnvironmentError when there is anything else at `path`,
  /// ConfigError when `path` ends in no name.
  NewFolder(const std::string& path, bool replaces);
  /// Removes what has not been committed.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const Folder& folder() const { return folder_; }
  /// Gives the folder its name `path`, which survives a power failure once this returns. To be called once,
  /// after its files were finished.
  void commit();

 private:
  Folder parent_;
  std::string name_, temporary_;
  bool replaces_;
  Folder folder_;
  bool committed_ = false;
};

}  // namespace trireme::checkpoint
