#pragma once
// The table of DeepSpeed's keys, and the values of a file as they are looked up in it. Private to
// plan/deepspeed*.cpp and their tests.
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme::plan {

/// The type that a key's value may have, beside "auto" and null.
enum class DeepSpeedType { kFlag, kWhole, kNumber, kNumbers, kWord, kAny };

enum class DeepSpeedEffect {
  kSets,      ///< `ours` gets its value, by `words` where there are some
  kTogether,  ///< `ours` follow from it and other keys (plan/deepspeed.cpp)
  kNeedless,  ///< nothing has to be set, and a note says why
  kOnly,      ///< `accepted` needs nothing, all else is refused
  kRefused
};

using DeepSpeedWords = std::span<const std::pair<std::string_view, std::string_view>>;

struct DeepSpeedKey {
  std::string_view key;  ///< "zero_optimization.stage"; with ".*" at the end: all keys below
  DeepSpeedType type;
  DeepSpeedEffect effect;
  std::string_view ours = "";  ///< our keys, with commas between
  std::string_view about =
      "";  ///< for the note, or why it is refused and what to do; kSets, kTogether: for readers
  std::string_view accepted = "";  ///< kOnly
  DeepSpeedWords words = {};       ///< kSets: theirs, ours
};

std::span<const DeepSpeedKey> deepspeed_keys();

/// The row of a key; none: it is unknown.
const DeepSpeedKey* find_deepspeed_key(std::string_view key);

/// A key of a file with its value.
struct DeepSpeedValue {
  std::string key;
  std::string text;  ///< as the file has it, strings without quotes
  DeepSpeedType type = DeepSpeedType::kAny;
  double number = 0.0;
  std::vector<double> numbers = {};
  bool open = false;  ///< "auto" or null
};

/// The values of a JSON text in their order. Throws ConfigError as read_deepspeed() does.
std::vector<DeepSpeedValue> read_deepspeed_values(const std::string& text, const std::string& name);

}  // namespace trireme::plan
