#include "trireme/cli/corpus_text.h"

#include <filesystem>
#include <utility>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/cli/words.h"

namespace trireme::cli {

data::Source source_of(const std::string& path) {
  std::error_code ignored;
  if (path != "builtin" && !std::filesystem::exists(data::parse_text_path(path).path, ignored)) {
    throw ConfigError(
        "[cli.data] there is no {}; name a text file, a folder of them, or 'builtin' for the C++ headers of "
        "libtorch",
        path);
  }
  return data::list_source(path == "builtin" ? std::string(kTorchRoot) + "/include" : path);
}

CorpusText::CorpusText(std::vector<data::Source> sources) : sources_(std::move(sources)) {
  for (const data::Source& source : sources_) {
    files_ += static_cast<int64_t>(source.files.size());
    bytes_ += source.bytes;
  }
}

std::optional<std::string_view> CorpusText::next() {
  while (documents_ || open_next()) {
    const auto document = documents_->next();
    read_bytes_ += documents_->last_bytes();
    if (document) return document;
    documents_.reset();
  }
  return std::nullopt;
}

bool CorpusText::open_next() {
  while (source_ < sources_.size() && file_ == sources_[source_].files.size()) {
    ++source_;
    file_ = 0;
  }
  if (source_ == sources_.size()) return false;
  const data::Source& source = sources_[source_];
  documents_.emplace(source, source.files[file_++]);
  last_path_ = documents_->path();
  return true;
}

void CorpusText::note_not_utf8() {
  if (last_not_utf8_ == path()) return;
  last_not_utf8_ = path();
  if (not_utf8_files_++ == 0) first_not_utf8_ = path();
}

std::string CorpusText::not_utf8_note() const {
  if (not_utf8_files_ == 0) return {};
  return fmt::format("{} of {} {} not UTF-8, the first is {}", with_commas(not_utf8_files_),
                     counted(files_, "file"), not_utf8_files_ == 1 ? "is" : "are", first_not_utf8_);
}

}  // namespace trireme::cli
