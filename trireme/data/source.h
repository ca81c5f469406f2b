#pragma once
// The files of a corpus, listed in one fixed order on every machine, with what tells an edited file from the
// old one.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/data/progress.h"

namespace trireme::data {

struct SourceFile {
  std::string name;  ///< relative to the root; of a single file its last component
  int64_t bytes = 0;
  int64_t mtime_ns = 0;
};

struct Source {
  std::string root;  ///< canonical path of the folder, or of the folder that holds the single file
  std::string path;  ///< canonical path of what was asked for
  std::vector<SourceFile> files;  ///< bytewise by name, none of them empty
  int64_t bytes = 0;
  std::string path_of(const SourceFile& file) const { return root + "/" + file.name; }
};

/// Lists `path`, a text file or a folder, recursively. Hidden entries, empty and special files are left out,
/// and so are symbolic links inside the folder: files inside the folder are listed anyway, and files outside
/// were not asked for. Throws ConfigError when the path is missing, not readable by this user, neither file
/// nor folder, or holds no text; DataError when its disk fails.
Source list_source(const std::string& path, const OnProgress& on_progress = {});

}  // namespace trireme::data
