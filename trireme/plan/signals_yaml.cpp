#include "trireme/plan/signals_yaml.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/text_file.h"
#include "trireme/plan/yaml_text.h"

namespace trireme::plan {
namespace {

constexpr int64_t kMostWorkers = 65536, kMostDims = 8;

/// A whole number that is not negative; none for other words.
std::optional<int64_t> parse_count(const std::string& word) {
  const std::optional<int64_t> value = parse_whole_text<int64_t>(word);
  if (!value || *value < 0) return std::nullopt;
  return value;
}

class EntryReader {
 public:
  explicit EntryReader(const std::string& file) : file_(file) {}

  Signal read(const std::string& name, const YAML::Node& value, const std::string& at) {
    signal_ = {.name = name, .at = at};
    if (!value.IsNull()) {
      read_keys(value, {"shard", "workers", "replicated", "backward", "compile"}, name, at);
    }
    if (replicated_ && axis_) {
      throw ConfigError("[plan.signals] {}: {} is replicated and has the axis {}; remove one of them", at,
                        name, *axis_);
    }
    signal_.placement =
        replicated_ ? TensorPlacement::replicate() : TensorPlacement::shard(axis_.value_or(0));
    signal_.is_placed = replicated_ || axis_;
    return std::move(signal_);
  }

 private:
  void read_keys(const YAML::Node& map, const std::vector<std::string>& known, const std::string& owner,
                 const std::string& at) {
    if (!map.IsMap()) {
      throw ConfigError("[plan.signals] {}: '{}' has no keys; write 'shard:' with axis and workers below it",
                        at, owner);
    }
    std::set<std::string> seen;
    for (const auto& entry : map) {
      const std::string place = place_of(file_, entry.first.Mark());
      const std::string key = entry.first.IsScalar() ? entry.first.Scalar() : "";
      if (std::ranges::find(known, key) == known.end()) throw_unknown(owner, key, known, place);
      if (!seen.insert(key).second)
        throw ConfigError("[plan.signals] {}: '{}' of {} is given twice; remove one", place, key, owner);
      read_key(key, entry.second, owner, place);
    }
  }

  [[noreturn]] static void throw_unknown(const std::string& owner, const std::string& key,
                                         const std::vector<std::string>& known, const std::string& at) {
    const std::string near = nearest_name(key, known);
    throw ConfigError("[plan.signals] {}: unknown key '{}' of {}{}; a signal has {}", at, key, owner,
                      near.empty() ? "" : fmt::format(", did you mean '{}'?", near), join(known, ", "));
  }

  void read_key(const std::string& key, const YAML::Node& value, const std::string& owner,
                const std::string& at) {
    if (key == "shard") {
      if (!value.IsNull()) read_keys(value, {"axis", "workers", "replicated"}, owner + ".shard", at);
    } else if (key == "workers") {
      read_workers(value, at);
    } else if (key == "axis") {
      axis_ = read_axis(value, at);
    } else if (key == "backward") {
      signal_.backward = scalar(value, "the name of a signal", at);
    } else if (key == "compile") {
      signal_.compile = read_bool(key, value, at);
    } else {
      if (has_replicated_)
        throw ConfigError("[plan.signals] {}: replicated of {} is given twice; remove one", at, signal_.name);
      has_replicated_ = true;
      replicated_ = read_bool(key, value, at);
    }
  }

  static std::string scalar(const YAML::Node& value, const char* wanted, const std::string& at) {
    if (!value.IsScalar()) throw ConfigError("[plan.signals] {}: give {}", at, wanted);
    return value.Scalar();
  }

  static int64_t read_axis(const YAML::Node& value, const std::string& at) {
    const std::string word = scalar(value, "axis as the number of a dimension", at);
    const std::optional<int64_t> axis = parse_count(word);
    if (!axis || *axis >= kMostDims) {
      throw ConfigError("[plan.signals] {}: axis '{}' is no dimension of a tensor; use 0 to {}", at, word,
                        kMostDims - 1);
    }
    return *axis;
  }

  static bool read_bool(const std::string& key, const YAML::Node& value, const std::string& at) {
    bool result = false;
    if (!value.IsScalar() || !YAML::convert<bool>::decode(value, result))
      throw ConfigError("[plan.signals] {}: {} is neither true nor false; use one of them", at, key);
    return result;
  }

  /// "workers:" without a value, or null, leaves them open, as it does where it is missing.
  void read_workers(const YAML::Node& value, const std::string& at) {
    if (value.IsNull()) return;
    if (!value.IsSequence() || value.size() == 0) {
      throw ConfigError("[plan.signals] {}: workers of {} are no list of numbers; write 'workers: [0, 1]'",
                        at, signal_.name);
    }
    if (!signal_.workers.empty())
      throw ConfigError("[plan.signals] {}: workers of {} are given twice; remove one", at, signal_.name);
    for (const auto& item : value) {
      const std::string word = item.IsScalar() ? item.Scalar() : "";
      const std::optional<int64_t> worker = parse_count(word);
      const std::string place = place_of(file_, item.Mark());
      if (!worker || *worker >= kMostWorkers) {
        throw ConfigError("[plan.signals] {}: '{}' is no worker; use numbers from 0 to {}", place, word,
                          kMostWorkers - 1);
      }
      if (std::ranges::find(signal_.workers, *worker) != signal_.workers.end()) {
        throw ConfigError("[plan.signals] {}: worker {} of {} is named twice; remove one", place, *worker,
                          signal_.name);
      }
      signal_.workers.push_back(*worker);
    }
  }

  const std::string& file_;
  Signal signal_;
  std::optional<int64_t> axis_;
  bool has_replicated_ = false, replicated_ = false;
};

}  // namespace

bool is_signal_name(std::string_view text) {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./";
  return !text.empty() && text.find_first_not_of(kLetters) == std::string_view::npos &&
         text.find("//") == std::string_view::npos;
}

std::vector<Signal> read_entries(const std::string& text, const std::string& name) {
  const YAML::Node root = parse_yaml(text, name, "plan.signals");
  std::vector<Signal> entries;
  if (root.IsNull()) return entries;
  if (!root.IsMap()) {
    throw ConfigError(
        "[plan.signals] {}: signals are a mapping of names to keys; begin with a line such as 'pp_stage0:'",
        place_of(name, root.Mark()));
  }
  for (const auto& entry : root) {
    const std::string at = place_of(name, entry.first.Mark());
    if (!entry.first.IsScalar() || !is_signal_name(entry.first.Scalar())) {
      throw ConfigError(
          "[plan.signals] {}: the name of a signal must be one word of letters, digits and '_', '-', '.' or "
          "'/', without '//'",
          at);
    }
    const std::string& word = entry.first.Scalar();
    if (const auto twin = std::ranges::find(entries, word, &Signal::name); twin != entries.end())
      throw ConfigError("[plan.signals] {}: '{}' is given twice, also in {}; remove one", at, word, twin->at);
    entries.push_back(EntryReader(name).read(word, entry.second, at));
  }
  return entries;
}

}  // namespace trireme::plan
