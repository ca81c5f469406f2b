#pragma once
// The documents of one file of a source, whatever its format.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "trireme/base/file.h"
#include "trireme/data/documents.h"
#include "trireme/data/json_lines.h"
#include "trireme/data/source.h"

namespace trireme::data {

class DocumentFile {
 public:
  /// `while_reading` is called at least once for each 16 MiB that are searched for the end of a document, and
  /// for each MiB that packed JSON Lines unpack to, but not for JSON Lines that are not packed. Throws
  /// DataError when the file cannot be read or has another size than when it was listed, EnvironmentError
  /// when this build cannot unpack it.
  DocumentFile(
      const Source& source, const SourceFile& file, std::function<void()> while_reading = [] {});
  DocumentFile(const DocumentFile&) = delete;
  DocumentFile& operator=(const DocumentFile&) = delete;

  /// The next document, valid until the next call; none at the end. Throws as JsonLines::next().
  std::optional<std::string_view> next();
  /// Bytes of the file that the last document took; those between documents count for none.
  int64_t last_bytes() const { return last_bytes_; }
  /// Whether documents are UTF-8 because the format says so.
  bool is_utf8_by_format() const { return std::holds_alternative<JsonLines>(format_); }
  const std::string& path() const { return path_; }

 private:
  /// The whole file, mapped: a text larger than memory is paged in and out as it is read.
  struct Text {
    MappedFile mapped;
    Documents documents;
  };

  std::string path_;
  std::variant<std::monostate, Text, JsonLines> format_;
  int64_t last_bytes_ = 0;
};

}  // namespace trireme::data
