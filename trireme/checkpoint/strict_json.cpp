#include "trireme/checkpoint/strict_json.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/utf8.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxDepth = 16;
/// An index of kMaxJsonBytes has fewer values, so whatever may be written can be read.
constexpr int64_t kMaxValues = kMaxJsonBytes / 4;

/// Refuses what no index of ours has, before memory is taken for it. A parser with a callback could do so
/// while it parses, but it looks at all elements of a list again after each one that is an object.
class Guard : public nlohmann::json_sax<Json> {
 public:
  Guard(const std::string& path, const char* advice) : path_(path), advice_(advice) {}

  bool null() override { return count(); }
  bool boolean(bool) override { return count(); }
  bool number_integer(number_integer_t) override { return count(); }
  bool number_unsigned(number_unsigned_t) override { return count(); }
  bool number_float(number_float_t, const string_t&) override { return count(); }
  bool string(string_t&) override { return count(); }
  bool binary(binary_t&) override { return count(); }
  bool start_array(size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool start_object(size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool key(string_t& key) override {
    if (!keys_.back().insert(key).second)
      fail_json(path_, fmt::format("the key '{:.80}' occurs twice", key), advice_);
    return count();
  }
  bool parse_error(size_t, const std::string&, const Json::exception& error) override {
    fail_json(path_, error.what(), advice_);
  }

 private:
  bool count() {
    if (++values_ > kMaxValues)
      fail_json(path_, fmt::format("it has more than {} values", kMaxValues), advice_);
    return true;
  }
  bool open() {
    if (std::ssize(keys_) >= kMaxDepth)
      fail_json(path_, fmt::format("it is nested deeper than {} levels", kMaxDepth), advice_);
    keys_.emplace_back();
    return count();
  }
  bool close() {
    keys_.pop_back();
    return true;
  }

  const std::string& path_;
  const char* advice_;
  std::vector<std::set<std::string>> keys_;  ///< of the objects and lists that are open
  int64_t values_ = 0;
};

}  // namespace

void fail_json(const std::string& path, std::string_view reason, const char* advice) {
  throw DataError("[checkpoint.json] {}: {}; {}", path, printable_line(reason), advice);
}

Json parse_json(std::string_view text, const std::string& path, const char* advice) {
  // The parser takes a zero byte for the end and would leave what follows unread.
  if (text.find('\0') != std::string_view::npos) fail_json(path, "it contains a zero byte", advice);
  Guard guard(path, advice);
  Json::sax_parse(text.begin(), text.end(), &guard);
  try {
    return Json::parse(text.begin(), text.end());
  } catch (const Json::exception& error) {
    fail_json(path, error.what(), advice);
  }
}

const Json& value_of(const Json& object, const char* key, const std::string& path) {
  if (!object.is_object())
    fail_json(path, fmt::format("the value that should have '{}' is not an object", key));
  const auto found = object.find(key);
  if (found == object.end()) fail_json(path, fmt::format("'{}' is missing", key));
  return *found;
}

int64_t count_of(const Json& object, const char* key, const std::string& path) {
  const Json& value = value_of(object, key, path);
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail_json(path, fmt::format("'{}' is not an integer of 63 bits", key));
  return value.get<int64_t>();
}

std::string text_of(const Json& object, const char* key, const std::string& path) {
  const Json& value = value_of(object, key, path);
  if (!value.is_string()) fail_json(path, fmt::format("'{}' is not a string", key));
  return value.get<std::string>();
}

uint64_t hash_of(const Json& value, const char* key, const std::string& path) {
  const auto* text = value.get_ptr<const Json::string_t*>();
  const auto digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (text == nullptr || text->size() != 16 || !std::ranges::all_of(*text, digit))
    fail_json(path, fmt::format("'{}' has something other than a hash of 16 hex digits", key));
  return std::stoull(*text, nullptr, 16);
}

void refuse_other_keys(const Json& object, std::initializer_list<const char*> known,
                       const std::string& path) {
  if (!object.is_object()) fail_json(path, "an object is expected but something else is there");
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::find(known, key) == known.end())
      fail_json(path, fmt::format("the key '{:.80}' is unknown", key));
  }
}

}  // namespace trireme::checkpoint
