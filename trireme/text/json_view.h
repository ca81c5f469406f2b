#pragma once
// A value of a JSON file that knows where it stands, so that errors can say so.
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace trireme::text {

/// Functions throw DataError naming file, place, the type found and the type wanted.
class JsonView {
 public:
  /// `file` is for messages. The value must live as long as the view.
  JsonView(const nlohmann::json& value, std::string file, std::string place = "")
      : value_(&value), file_(std::move(file)), place_(std::move(place)) {}

  const nlohmann::json& value() const { return *value_; }
  const std::string& file() const { return file_; }
  /// "tokenizer.json: model.vocab".
  std::string where() const;

  /// Whether the object has `key`, and not as null.
  bool has(const char* key) const;
  JsonView at(const char* key) const;
  std::vector<JsonView> elements() const;

  std::string text() const;
  int64_t integer() const;
  double number() const;
  /// A string of exactly one character.
  uint32_t character() const;

  std::string text_at(const char* key) const { return at(key).text(); }
  std::string text_or(const char* key, std::string fallback) const;
  bool flag_or(const char* key, bool fallback) const;
  int64_t integer_or(const char* key, int64_t fallback) const;

  /// Throws DataError: "[text.file] <where> <problem>".
  [[noreturn]] void refuse(std::string_view problem) const;
  [[noreturn]] void refuse_type(std::string_view wanted) const;

 private:
  const nlohmann::json* value_;
  std::string file_, place_;
};

/// The JSON in `path`. Throws EnvironmentError when it cannot be read and DataError when it is no JSON or
/// larger than read_bounded() allows.
nlohmann::json read_json(const std::string& path);

/// The bytes of `path`. Throws DataError beyond 1 GiB, which no tokenizer has.
std::string read_bounded(const std::string& path);

}  // namespace trireme::text
