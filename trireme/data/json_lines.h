#pragma once
// JSON Lines: an object a line, of which one field is a document.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "trireme/base/file.h"
#include "trireme/data/byte_stream.h"

namespace trireme::data {

/// The field that holds the text where none is named.
inline constexpr const char* kTextField = "text";

/// Whether a file is read as JSON Lines: *.jsonl, *.jsonl.gz and *.jsonl.zst.
bool is_json_lines(std::string_view name);

/// The documents of one file, a line each. Empty lines, and documents of no bytes, are left out.
class JsonLines {
 public:
  /// `field`: empty stands for kTextField. `while_reading` is called at least once for each MiB that a packed
  /// file unpacks to. Throws DataError when the file cannot be read, EnvironmentError when this build cannot
  /// unpack it.
  JsonLines(const std::string& path, std::string field, std::function<void()> while_reading);
  /// The next document, UTF-8 and valid until the next call; none at the end of the file. Throws DataError
  /// naming file and line when a line is no JSON object or its field is no string, ConfigError when it has no
  /// such field.
  std::optional<std::string_view> next();
  /// The next line that is not empty, whatever it holds, valid until the next call; none at the end.
  std::optional<std::string_view> next_record();
  /// The number of the line that was last returned, from 1 on.
  int64_t line() const { return line_; }
  /// Bytes of the file that were read so far.
  int64_t taken() const;

 private:
  std::optional<std::string_view> next_line();
  std::optional<std::string_view> next_unpacked_line();
  bool unpack_more();
  void take_document(std::string_view line);
  [[noreturn]] void refuse(std::string_view reason) const;

  std::string path_, field_;
  std::function<void()> while_reading_;
  MappedFile mapped_;                   ///< of a file that is not packed
  std::unique_ptr<ByteStream> packed_;  ///< of one that is
  std::string buffer_;                  ///< text of packed_ from begin_ on that is still to come
  size_t begin_ = 0;                    ///< in mapped_ or buffer_
  int64_t line_ = 0;                    ///< the last one, from 1
  std::string document_;
};

}  // namespace trireme::data
