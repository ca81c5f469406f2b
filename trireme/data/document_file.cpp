#include "trireme/data/document_file.h"

#include <filesystem>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::data {
namespace {

std::string_view text_of(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

void check_unchanged(const std::string& path, int64_t listed) {
  std::error_code error;
  const auto found = static_cast<int64_t>(std::filesystem::file_size(path, error));
  if (error || found == listed) return;
  throw DataError(
      "[data.corpus] {} changed while it was read: it had {} bytes and now has {}; run again when nothing "
      "writes to it",
      path, listed, found);
}

}  // namespace

DocumentFile::DocumentFile(const Source& source, const SourceFile& file, std::function<void()> while_reading)
    : path_(source.path_of(file)) {
  check_unchanged(path_, file.bytes);
  if (is_json_lines(file.name)) {
    format_.emplace<JsonLines>(path_, source.field, std::move(while_reading));
    return;
  }
  MappedFile mapped = map_source_file(path_);
  Documents documents(text_of(mapped), std::move(while_reading));
  format_.emplace<Text>(std::move(mapped), std::move(documents));
}

std::optional<std::string_view> DocumentFile::next() {
  if (auto* const text = std::get_if<Text>(&format_)) {
    const auto document = text->documents.next();
    last_bytes_ = document ? static_cast<int64_t>(document->size()) : 0;
    return document;
  }
  JsonLines& lines = std::get<JsonLines>(format_);
  const int64_t before = lines.taken();
  const auto document = lines.next();
  last_bytes_ = lines.taken() - before;
  return document;
}

}  // namespace trireme::data
