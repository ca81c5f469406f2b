#pragma once
// A folder that is there with all that belongs in it, or not at all.
#include <string>

#include "trireme/checkpoint/folder.h"

namespace trireme::checkpoint {

class NewFolder {
 public:
  /// Makes a folder beside `path` to write to, under a name of its own. `replaces`: a folder of files that is
  /// called so may give way to the new one. Throws EnvironmentError when there is one all the same, or
  /// something that is no folder of files, ConfigError for a name that cannot be.
  NewFolder(const std::string& path, bool replaces);
  /// Removes what has not been committed.
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const Folder& folder() const { return folder_; }
  /// It has the name that it was made for when this returns, also after a power failure. Files were finished
  /// before. Once.
  void commit();

 private:
  Folder parent_;
  std::string name_, temporary_;
  bool replaces_;
  Folder folder_;
  bool committed_ = false;
};

}  // namespace trireme::checkpoint
