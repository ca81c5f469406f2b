#pragma once
// The documents of text files, one after the other, as training reads them.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/data/document_file.h"
#include "trireme/data/source.h"

namespace trireme::cli {

/// The source of `path`: a file, a folder, or 'builtin'. Throws as data::list_source().
data::Source source_of(const std::string& path);

class CorpusText {
 public:
  explicit CorpusText(std::vector<data::Source> sources);

  /// The next document, valid until the next call; none after the last. Throws DataError when a file cannot
  /// be read.
  std::optional<std::string_view> next();

  /// The path of the file that the last document is from.
  const std::string& path() const { return last_path_; }
  int64_t files() const { return files_; }
  int64_t bytes() const { return bytes_; }            ///< of all files
  int64_t read_bytes() const { return read_bytes_; }  ///< of these, that the documents so far took
  /// Counts text in which this file turned out not to be UTF-8.
  void note_not_utf8();
  /// "2 files are not UTF-8, the first is a/b.txt"; empty: all are.
  std::string not_utf8_note() const;
  int64_t not_utf8_files() const { return not_utf8_files_; }

 private:
  bool open_next();

  std::vector<data::Source> sources_;
  size_t source_ = 0, file_ = 0;  ///< to be opened next
  std::optional<data::DocumentFile> documents_;
  std::string last_path_;
  int64_t files_ = 0, bytes_ = 0, read_bytes_ = 0, not_utf8_files_ = 0;
  std::string first_not_utf8_, last_not_utf8_;  ///< paths
};

}  // namespace trireme::cli
