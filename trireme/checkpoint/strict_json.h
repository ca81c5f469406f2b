#pragma once
// JSON from files that may be hostile. Private to checkpoint/*.cpp and whoever reads what a run keeps beside
// its tensors.
#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>

namespace trireme::checkpoint {

/// The most bytes of a file of JSON: longer ones are not read, and hence not written.
inline constexpr int64_t kMaxJsonBytes = int64_t{64} << 20;

/// The advice in errors about a damaged file of a checkpoint, and about one from elsewhere.
inline constexpr const char* kUseAnother = "the file is damaged, use another checkpoint";
inline constexpr const char* kFetchAgain = "correct it, or fetch it again from its source";

/// The document. Throws DataError naming `path` and `advice`: broken JSON, invalid UTF-8, a key twice in one
/// object, more than 16 levels, or more values than a quarter of kMaxJsonBytes.
nlohmann::json parse_json(std::string_view text, const std::string& path, const char* advice = kUseAnother);

/// The value of `key`. Throws DataError naming both when `object` has none or is no object.
const nlohmann::json& value_of(const nlohmann::json& object, const char* key, const std::string& path);
/// Likewise, where the value must be a whole number that is not negative; a text; a hash of 16 hex digits.
int64_t count_of(const nlohmann::json& object, const char* key, const std::string& path);
std::string text_of(const nlohmann::json& object, const char* key, const std::string& path);
uint64_t hash_of(const nlohmann::json& value, const char* key, const std::string& path);

/// Throws DataError naming a key of `object` that is none of `known`.
void refuse_other_keys(const nlohmann::json& object, std::initializer_list<const char*> known,
                       const std::string& path);

/// Throws DataError naming `path`, `reason` and `advice`: the file is damaged, or not what it should be.
[[noreturn]] void fail_json(const std::string& path, std::string_view reason,
                            const char* advice = kUseAnother);

}  // namespace trireme::checkpoint
