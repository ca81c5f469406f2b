#include "trireme/text/json_view.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/utf8.h"
#include "trireme/text/unicode.h"

namespace trireme::text {
namespace {

constexpr uintmax_t kLargestFile = uintmax_t{1} << 30;

}  // namespace

std::string JsonView::where() const {
  return place_.empty() ? file_ : file_ + ": " + place_;
}

void JsonView::refuse(std::string_view problem) const {
  throw DataError("[text.file] {} {}", where(), problem);
}

void JsonView::refuse_type(std::string_view wanted) const {
  refuse(fmt::format("is {} where {} is wanted; correct it, or get the file again", value_->type_name(),
                     wanted));
}

bool JsonView::has(const char* key) const {
  if (!value_->is_object()) refuse_type("an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonView JsonView::at(const char* key) const {
  if (!has(key)) refuse(fmt::format("has no '{}'; correct it, or get the file again", key));
  return {(*value_)[key], file_, place_.empty() ? key : place_ + "." + key};
}

std::vector<JsonView> JsonView::elements() const {
  if (!value_->is_array()) refuse_type("an array");
  std::vector<JsonView> views;
  for (size_t i = 0; i < value_->size(); ++i) {
    views.emplace_back((*value_)[i], file_, fmt::format("{}[{}]", place_, i));
  }
  return views;
}

std::string JsonView::text() const {
  if (!value_->is_string()) refuse_type("a string");
  return value_->get<std::string>();
}

int64_t JsonView::integer() const {
  const bool is_large = value_->is_number_unsigned() && value_->get<uint64_t>() > INT64_MAX;
  if (!value_->is_number_integer() || is_large) refuse_type("a whole number of 63 bits");
  return value_->get<int64_t>();
}

double JsonView::number() const {
  if (!value_->is_number()) refuse_type("a number");
  return value_->get<double>();
}

uint32_t JsonView::character() const {
  const std::string content = text();
  if (count_characters(content) != 1) refuse("is not one character; correct it, or get the file again");
  return code_point_at(content, 0).value;
}

std::string JsonView::text_or(const char* key, std::string fallback) const {
  return has(key) ? text_at(key) : std::move(fallback);
}

bool JsonView::flag_or(const char* key, bool fallback) const {
  if (!has(key)) return fallback;
  const JsonView flag = at(key);
  if (!flag.value().is_boolean()) flag.refuse_type("true or false");
  return flag.value().get<bool>();
}

int64_t JsonView::integer_or(const char* key, int64_t fallback) const {
  return has(key) ? at(key).integer() : fallback;
}

std::string read_bounded(const std::string& path) {
  std::error_code ignored;
  const uintmax_t bytes = std::filesystem::file_size(path, ignored);
  if (!ignored && bytes > kLargestFile) {
    throw DataError("[text.file] {} has {} bytes, more than the {} of any tokenizer; name a tokenizer's file",
                    path, bytes, kLargestFile);
  }
  return read_file(path);
}

nlohmann::json read_json(const std::string& path) {
  nlohmann::json json = nlohmann::json::parse(read_bounded(path), nullptr, false);
  if (json.is_discarded()) {
    throw DataError("[text.file] {} is no JSON, or is cut short; get the file again", path);
  }
  return json;
}

}  // namespace trireme::text
