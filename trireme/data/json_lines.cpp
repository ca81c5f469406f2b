#include "trireme/data/json_lines.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/data/source.h"

namespace trireme::data {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kUnpackedBytes = size_t{1} << 20;  // at once
constexpr size_t kMostLineBytes = size_t{1} << 30;  // of a packed file, which could unpack to anything

/// Reads one field of the outermost object, without a copy of the others.
class FieldReader final : public nlohmann::json_sax<Json> {
 public:
  FieldReader(const std::string& field, std::string& text) : field_(field), text_(text) {}

  bool is_object = false;
  bool found = false;
  const char* kind = nullptr;  ///< of the field where it is no string
  std::string error;

  bool null() override { return value("null"); }
  bool boolean(bool) override { return value("a boolean"); }
  bool number_integer(number_integer_t) override { return value("a number"); }
  bool number_unsigned(number_unsigned_t) override { return value("a number"); }
  bool number_float(number_float_t, const string_t&) override { return value("a number"); }
  bool binary(binary_t&) override { return value("bytes"); }
  bool string(string_t& text) override {
    if (is_wanted()) text_.swap(text);
    return value(nullptr);
  }
  bool start_object(std::size_t) override {
    if (depth_ == 0) is_object = true;
    value("an object");
    ++depth_;
    return true;
  }
  bool start_array(std::size_t) override {
    value("an array");
    ++depth_;
    return true;
  }
  bool end_object() override { return --depth_ >= 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool key(string_t& name) override {
    if (depth_ == 1) at_field_ = name == field_;
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& cause) override {
    error = cause.what();
    return false;
  }

 private:
  bool is_wanted() const { return depth_ == 1 && at_field_; }
  bool value(const char* other_kind) {
    if (!is_wanted()) return true;
    found = true;
    kind = other_kind;
    return true;
  }

  const std::string& field_;
  std::string& text_;
  int64_t depth_ = 0;
  bool at_field_ = false;
};

/// What the library says, from the column on and without the bytes that it read last, which may be many.
std::string reason_of(const std::string& message) {
  const size_t column = message.find("column ");
  const std::string reason = message.substr(column == std::string::npos ? 0 : column);
  return printable_line(reason.substr(0, reason.find("; last read: ")));
}

/// "'title' and 'body'", the names of all fields of an object; `likely` becomes the first one with a string.
std::string fields_of(std::string_view line, std::string& likely) {
  const Json object = Json::parse(line);
  std::vector<std::string> names;
  for (const auto& [name, value] : object.items()) {
    names.push_back(name);
    if (value.is_string() && likely.empty()) likely = printable_line(name);
  }
  return names.empty() ? "no field at all" : some_of(names);
}

bool is_blank(std::string_view line) {
  return line.find_first_not_of(" \t\r\n") == std::string_view::npos;
}

bool is_packed(std::string_view name) {
  return name.ends_with(".gz") || name.ends_with(".zst");
}

}  // namespace

bool is_json_lines(std::string_view name) {
  return name.ends_with(".jsonl") || name.ends_with(".jsonl.gz") || name.ends_with(".jsonl.zst");
}

JsonLines::JsonLines(const std::string& path, std::string field, std::function<void()> while_reading)
    : path_(path),
      field_(field.empty() ? kTextField : std::move(field)),
      while_reading_(std::move(while_reading)) {
  if (!is_packed(path)) {
    mapped_ = map_source_file(path);
  } else {
    packed_ = path.ends_with(".gz") ? open_gzip(path) : open_zstd(path);
  }
}

std::optional<std::string_view> JsonLines::next_record() {
  while (const auto line = next_line()) {
    ++line_;
    if (!is_blank(*line)) return line;
  }
  return std::nullopt;
}

std::optional<std::string_view> JsonLines::next() {
  while (const auto line = next_record()) {
    take_document(*line);
    if (!document_.empty()) return document_;
  }
  return std::nullopt;
}

int64_t JsonLines::taken() const {
  return packed_ ? packed_->taken() : static_cast<int64_t>(begin_);
}

std::optional<std::string_view> JsonLines::next_line() {
  if (packed_) return next_unpacked_line();
  const std::string_view rest(reinterpret_cast<const char*>(mapped_.bytes().data()) + begin_,
                              mapped_.bytes().size() - begin_);
  if (rest.empty()) return std::nullopt;
  const std::string_view line = rest.substr(0, rest.find('\n'));
  begin_ += std::min(line.size() + 1, rest.size());
  return line;
}

std::optional<std::string_view> JsonLines::next_unpacked_line() {
  size_t searched = begin_;
  for (;;) {
    const size_t end = buffer_.find('\n', searched);
    if (end != std::string::npos) {
      const std::string_view line(buffer_.data() + begin_, end - begin_);
      begin_ = end + 1;
      return line;
    }
    buffer_.erase(0, std::exchange(begin_, 0));
    searched = buffer_.size();
    if (unpack_more()) continue;
    begin_ = buffer_.size();
    return buffer_.empty() ? std::nullopt : std::optional<std::string_view>(buffer_);
  }
}

/// Whether there was more text, which is now at the end of the buffer.
bool JsonLines::unpack_more() {
  if (buffer_.size() > kMostLineBytes) {
    ++line_;
    refuse(fmt::format("it has more than {}", format_bytes(static_cast<double>(kMostLineBytes))));
  }
  const size_t before = buffer_.size();
  buffer_.resize(before + kUnpackedBytes);
  buffer_.resize(before + packed_->read(std::span(buffer_).subspan(before)));
  while_reading_();
  return buffer_.size() > before;
}

void JsonLines::take_document(std::string_view line) {
  document_.clear();
  FieldReader reader(field_, document_);
  const bool whole = Json::sax_parse(line.data(), line.data() + line.size(), &reader);
  if (!whole) refuse(reason_of(reader.error));
  if (!reader.is_object) refuse("it is no JSON object");
  if (reader.kind != nullptr) refuse(fmt::format("its field '{}' is {}, not a string", field_, reader.kind));
  if (reader.found) return;
  std::string likely;
  const std::string fields = fields_of(line, likely);
  throw ConfigError(
      "[data.json_lines] {}, line {}: there is no field '{}', but {}; name the one that holds the text "
      "behind "
      "the path, as in data.path={}#{}",
      path_, line_, field_, fields, path_, likely.empty() ? "FIELD" : likely);
}

void JsonLines::refuse(std::string_view reason) const {
  throw DataError("[data.json_lines] {}, line {}: {}; correct the line or take it out", path_, line_, reason);
}

}  // namespace trireme::data
