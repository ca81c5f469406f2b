#pragma once
// The files of a corpus, listed in one fixed order on every machine, with what tells an edited file from the
// old one.
#include <cstdint>
#include <string>
#include <vector>

#include "trireme/base/file.h"
#include "trireme/data/progress.h"

namespace trireme::data {

struct SourceFile {
  std::string name;  ///< relative to the root; of a single file its last component
  int64_t bytes = 0;
  int64_t mtime_ns = 0;
};

struct Source {
  std::string root;        ///< canonical path of the folder, or of the folder that holds the single file
  std::string path;        ///< canonical path of what was asked for
  std::string field = {};  ///< of JSON Lines, that holds the text; empty: none was named
  std::vector<SourceFile> files;  ///< bytewise by name, none of them empty
  int64_t bytes = 0;
  std::string path_of(const SourceFile& file) const { return root + "/" + file.name; }
};

/// A path of texts as people write it: FILE.jsonl#body is the field `body` of FILE.jsonl.
struct TextPath {
  std::string path, field;  ///< no field: none was named
};

/// What follows the last # is a field, unless there is a file or folder whose name it belongs to.
TextPath parse_text_path(const std::string& text);

/// Lists `path`, a text file or a folder, as parse_text_path() takes it, recursively. Hidden entries, empty
/// and special files are left out, and so are symbolic links inside the folder: files inside the folder are
/// listed anyway, and files outside were not asked for. Throws ConfigError when the path is missing, not
/// readable by this user, neither file nor folder, or holds no text; where a file is Parquet or packed (but
/// for JSON Lines), or a field is named and no file is JSON Lines; DataError when its disk fails.
Source list_source(const std::string& path, const OnProgress& on_progress = {});

/// A file of a source. Throws DataError when it cannot be read.
MappedFile map_source_file(const std::string& path);

}  // namespace trireme::data
