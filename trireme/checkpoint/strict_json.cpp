#include "trireme/checkpoint/strict_json.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr int kMaxDepth = 16;
/// Our indexes have fewer values in as many bytes as are read, so what their writer may write, this takes.
constexpr int64_t kMaxValues = kMaxJsonBytes / 4;

/// Counts what the parser has found and stops it.
class Guard {
 public:
  explicit Guard(const std::string& path) : path_(path) {}

  bool operator()(int depth, Json::parse_event_t event, const Json& parsed) {
    if (depth > kMaxDepth) fail_json(path_, fmt::format("it is nested deeper than {} levels", kMaxDepth));
    if (++values_ > kMaxValues) fail_json(path_, fmt::format("it holds more than {} values", kMaxValues));
    switch (event) {
      case Json::parse_event_t::object_start:
        keys_.emplace_back();
        break;
      case Json::parse_event_t::object_end:
        keys_.pop_back();
        break;
      case Json::parse_event_t::key:
        if (!keys_.back().insert(parsed.get<std::string>()).second)
          fail_json(path_, fmt::format("the key '{:.80}' comes twice", parsed.get<std::string>()));
        break;
      default:
        break;
    }
    return true;
  }

 private:
  const std::string& path_;
  std::vector<std::set<std::string>> keys_;  ///< of the objects that are open
  int64_t values_ = 0;
};

}  // namespace

void fail_json(const std::string& path, std::string_view reason) {
  throw DataError("[checkpoint.json] {}: {}; the file is damaged, take another checkpoint", path,
                  printable(reason));
}

Json parse_json(std::string_view text, const std::string& path) {
  // The parser takes a zero byte for the end and would leave what follows unread.
  if (text.find('\0') != std::string_view::npos) fail_json(path, "it holds a zero byte");
  Guard guard(path);
  try {
    return Json::parse(text.begin(), text.end(), [&](int depth, Json::parse_event_t event, Json& parsed) {
      return guard(depth, event, parsed);
    });
  } catch (const Json::exception& error) {
    fail_json(path, error.what());
  }
}

const Json& value_of(const Json& object, const char* key, const std::string& path) {
  if (!object.is_object()) fail_json(path, fmt::format("what should have '{}' is no object", key));
  const auto found = object.find(key);
  if (found == object.end()) fail_json(path, fmt::format("'{}' is missing", key));
  return *found;
}

int64_t count_of(const Json& object, const char* key, const std::string& path) {
  const Json& value = value_of(object, key, path);
  if (!value.is_number_unsigned() ||
      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
    fail_json(path, fmt::format("'{}' is no whole number of 63 bits", key));
  return value.get<int64_t>();
}

std::string text_of(const Json& object, const char* key, const std::string& path) {
  const Json& value = value_of(object, key, path);
  if (!value.is_string()) fail_json(path, fmt::format("'{}' is no text", key));
  return value.get<std::string>();
}

uint64_t hash_of(const Json& value, const char* key, const std::string& path) {
  const auto* text = value.get_ptr<const Json::string_t*>();
  const auto digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (text == nullptr || text->size() != 16 || !std::ranges::all_of(*text, digit))
    fail_json(path, fmt::format("'{}' holds what is no hash of 16 hex digits", key));
  return std::stoull(*text, nullptr, 16);
}

void refuse_other_keys(const Json& object, std::initializer_list<const char*> known,
                       const std::string& path) {
  if (!object.is_object()) fail_json(path, "an object is something else");
  for (const auto& [key, value] : object.items()) {
    if (std::ranges::find(known, key) == known.end())
      fail_json(path, fmt::format("the key '{:.80}' is not known", key));
  }
}

}  // namespace trireme::checkpoint
