// Values between text and fields: parsing with the errors of a config, and formatting that reads back
// exactly.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/config_internal.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return result;
}

/// YAML allows a plus sign before a number, and from_chars() does not.
std::string_view without_plus(std::string_view text) {
  const bool has_number = text.size() > 1 && text[0] == '+' && text[1] != '-' && text[1] != '+';
  return has_number ? text.substr(1) : text;
}

std::optional<double> parse_double(std::string_view text) {
  const auto value = parse_whole_text<double>(without_plus(text));
  return value && std::isfinite(*value) ? value : std::nullopt;
}

/// "100", and also "1e3" or "2.0", which are whole and exact below 2^53.
std::optional<int64_t> parse_int(std::string_view text) {
  if (const auto value = parse_whole_text<int64_t>(without_plus(text))) return value;
  constexpr double kExact = 9007199254740992.0;
  const auto value = parse_double(text);
  if (!value || *value != std::floor(*value) || std::fabs(*value) > kExact) return std::nullopt;
  if (text.find_first_not_of("+-0123456789") == std::string_view::npos)
    return std::nullopt;  // too large for int64
  return static_cast<int64_t>(*value);
}

std::optional<bool> parse_bool(std::string_view text) {
  const std::string word = lower(text);
  if (word == "true" || word == "yes" || word == "1") return true;
  if (word == "false" || word == "no" || word == "0") return false;
  return std::nullopt;
}

std::string_view expected_type(const Field& field) {
  if (std::holds_alternative<int64_t*>(field.value)) return "a whole number";
  if (std::holds_alternative<double*>(field.value)) return "a finite number";
  return "true or false";
}

/// Whether it is a whole number, if a very long one.
bool is_whole_number(std::string_view text) {
  const std::string_view digits = text.substr(text.starts_with('-') || text.starts_with('+') ? 1 : 0);
  return !digits.empty() && digits.find_first_not_of("0123456789") == std::string_view::npos;
}

[[noreturn]] void throw_out_of_range(const Field& field, std::string_view text, std::string_view origin) {
  throw ConfigError("[plan.config] {}={} ({}) is out of range; it must be {}", field.key, text, origin,
                    allowed_values(field));
}

[[noreturn]] void throw_wrong_type(const Field& field, std::string_view text, std::string_view origin) {
  const std::string allowed = allowed_values(field);
  throw ConfigError("[plan.config] {}='{}' ({}) is not {}; set it to {}{}", field.key, text, origin,
                    expected_type(field), expected_type(field), allowed.empty() ? "" : ", " + allowed);
}

void check_range(const Field& field, double value, std::string_view text, std::string_view origin) {
  if ((!field.min || value >= *field.min) && (!field.max || value <= *field.max)) return;
  throw_out_of_range(field, text, origin);
}

bool is_choice(const Field& field, std::string_view text) {
  return field.choices.empty() || std::ranges::find(field.choices, text) != field.choices.end();
}

/// The choice that PyTorch and other trainers call `word`, in lower case; empty: none.
std::string choice_of_others(const Field& field, const std::string& word) {
  static constexpr std::pair<std::string_view, std::string_view> kWords[] = {
      {"bfloat16", "bf16"}, {"float16", "fp16"},   {"half", "fp16"},       {"float32", "fp32"},
      {"float", "fp32"},    {"cifar10", "images"}, {"cifar100", "images"}, {"mnist", "images"}};
  std::string plain = word;
  std::erase_if(plain, [](char letter) { return letter == '-' || letter == '_'; });
  for (const auto& [other, ours] : kWords) {
    if (plain == other && std::ranges::find(field.choices, ours) != field.choices.end())
      return std::string(ours);
  }
  return {};
}

[[noreturn]] void throw_unknown_word(const Field& field, std::string_view text, std::string_view origin) {
  const std::string word = lower(text);
  std::string near = choice_of_others(field, word);
  if (near.empty()) near = nearest_name(word, field.choices);
  throw ConfigError("[plan.config] {}='{}' ({}) is unknown{}; choose one of {}", field.key, text, origin,
                    near.empty() ? "" : fmt::format(", did you mean '{}'?", near), allowed_values(field));
}

/// One overload a type; std::visit picks.
struct Assigner {
  const Field& field;
  std::string_view text, origin;

  void operator()(int64_t* target) const {
    const std::optional<int64_t> value = parse_int(text);
    if (!value && is_whole_number(text)) throw_out_of_range(field, text, origin);
    store_number(target, value);
  }
  void operator()(double* target) const { store_number(target, parse_double(text)); }
  void operator()(bool* target) const {
    const auto value = parse_bool(text);
    if (!value) throw_wrong_type(field, text, origin);
    *target = *value;
  }
  void operator()(std::string* target) const {
    if (!is_choice(field, text)) throw_unknown_word(field, text, origin);
    *target = text;
  }
  void operator()(const WordRef& target) const {
    if (!target.write(target.member, text)) throw_unknown_word(field, text, origin);
  }

 private:
  template <typename Number>
  void store_number(Number* target, std::optional<Number> value) const {
    if (!value) throw_wrong_type(field, text, origin);
    check_range(field, static_cast<double>(*value), text, origin);
    *target = *value;
  }
};

/// Shortest text of the same double, always with a point: readers of YAML 1.1 take "1e-05" for a string.
std::string format_double(double value) {
  std::string text = fmt::format("{}", value);
  if (text.find('.') == std::string::npos) text.insert(std::min(text.find('e'), text.size()), ".0");
  return text;
}

/// Words and paths that YAML reads as strings without quotes.
bool is_plain(const std::string& text) {
  static constexpr std::string_view kReserved[] = {"true", "false", "yes", "no", "on",
                                                   "off",  "null",  "y",   "n"};
  const auto first = static_cast<unsigned char>(text.empty() ? '\0' : text.front());
  if (std::isalpha(first) == 0 && first != '/' && first != '_') return false;
  const std::string word = lower(text);
  if (std::find(std::begin(kReserved), std::end(kReserved), word) != std::end(kReserved)) return false;
  return std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return std::isalnum(c) != 0 || c == '_' || c == '-' || c == '.' || c == '/';
  });
}

std::string format_string(const std::string& text) {
  if (is_plain(text)) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (c == '\t') {
      quoted += "\\t";
    } else if (code < 0x20 || code == 0x7f) {
      quoted += fmt::format("\\x{:02x}", code);
    } else {
      quoted += c;
    }
  }
  return quoted + '"';
}

struct Formatter {
  std::string operator()(int64_t value) const { return std::to_string(value); }
  std::string operator()(double value) const { return format_double(value); }
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(const std::string& value) const { return format_string(value); }
};

using Value = std::variant<int64_t, double, bool, std::string>;

struct ValueReader {
  template <typename Member>
  Value operator()(const Member* member) const {
    return *member;
  }
  Value operator()(const WordRef& word) const { return word.read(word.member); }
};

}  // namespace

void assign(const Field& field, std::string_view text, std::string_view origin) {
  if (!field.is_mapping) return std::visit(Assigner{field, text, origin}, field.value);
  try {
    std::visit(Assigner{field, text, origin}, field.value);
  } catch (const ConfigError& error) {  // of something in the mapping, which may not know where that stands
    if (std::string_view(error.what()).find(origin) != std::string_view::npos) throw;
    throw ConfigError("{} (from {})", error.what(), origin);
  }
}

Value value_of(const Field& field) {
  return std::visit(ValueReader{}, field.value);
}

std::string format_value(const Field& field) {
  if (field.is_mapping) {
    const std::string text = std::get<std::string>(value_of(field));
    return text.empty() ? "{}" : text;
  }
  return std::visit(Formatter{}, value_of(field));
}

std::string_view type_name(const Field& field) {
  static constexpr std::string_view kTypes[] = {"integer", "number", "boolean", "string"};
  return kTypes[value_of(field).index()];
}

std::string to_text(const ReshardAfterForward& reshard) {
  switch (reshard.kind) {
    case ReshardAfterForward::Kind::kAsPolicy:
      return "auto";
    case ReshardAfterForward::Kind::kFree:
      return "true";
    case ReshardAfterForward::Kind::kKeep:
      return "false";
    case ReshardAfterForward::Kind::kOver:
      break;
  }
  return std::to_string(reshard.ranks);
}

std::optional<ReshardAfterForward> parse_reshard(std::string_view text) {
  using Kind = ReshardAfterForward::Kind;
  if (text == "auto") return ReshardAfterForward{};
  if (text == "true") return ReshardAfterForward{.kind = Kind::kFree};
  if (text == "false") return ReshardAfterForward{.kind = Kind::kKeep};
  constexpr int64_t kMost = 1'000'000;  // as of parallel.dp_shard
  const auto ranks = parse_whole_text<int64_t>(text);
  if (!ranks || *ranks < 1 || *ranks > kMost) return std::nullopt;
  return ReshardAfterForward{.kind = Kind::kOver, .ranks = *ranks};
}

std::string to_text(const StageCut& cut) {
  if (cut.kind == StageCut::Kind::kCost) return "cost";
  if (cut.kind == StageCut::Kind::kEven) return "even";
  return fmt::format("{}", fmt::join(cut.blocks, ","));
}

std::optional<StageCut> parse_cut(std::string_view text) {
  using Kind = StageCut::Kind;
  if (text == "cost") return StageCut{};
  if (text == "even") return StageCut{.kind = Kind::kEven};
  constexpr int64_t kMost = 10'000;  // as of model.n_layers
  StageCut cut{.kind = Kind::kBlocks};
  for (const std::string& part : split(std::string(text), ',')) {
    const auto blocks = parse_whole_text<int64_t>(part);
    if (!blocks || *blocks < 0 || *blocks > kMost) return std::nullopt;
    cut.blocks.push_back(*blocks);
  }
  return cut;
}

std::string to_text(const Fp8Skip& skip) {
  std::vector<std::string> words;
  if (skip.first) words.emplace_back("first");
  if (skip.last) words.emplace_back("last");
  for (const int64_t block : skip.blocks) words.push_back(std::to_string(block));
  return words.empty() ? "none" : join(words, ",");
}

std::optional<Fp8Skip> parse_skip(std::string_view text) {
  Fp8Skip skip;
  if (text == "none") return skip;
  for (const std::string& word : split(std::string(text), ',')) {
    const auto block = parse_whole_text<int64_t>(word);
    if (word == "first") {
      skip.first = true;
    } else if (word == "last") {
      skip.last = true;
    } else if (block && *block >= 0) {
      skip.blocks.push_back(*block);
    } else {
      return std::nullopt;
    }
  }
  return skip;
}

std::string allowed_values(const Field& field) {
  if (field.min && field.max) return fmt::format("{} to {}", *field.min, *field.max);
  if (field.min) return fmt::format("at least {}", *field.min);
  if (field.max) return fmt::format("at most {}", *field.max);
  if (!field.form.empty()) return field.form;
  std::vector<std::string> names;
  for (const std::string& choice : field.choices) {
    if (!choice.empty()) names.push_back(choice);
  }
  return join(names, ", ");
}

std::string suggest_key(std::string_view key) {
  const std::string leaf(key.substr(key.rfind('.') + 1));
  Config unused;
  std::vector<std::string> keys, same_leaf;
  for (const Field& field : fields(unused)) {
    keys.push_back(field.key);
    if (field.key == leaf || field.key.ends_with("." + leaf)) same_leaf.push_back(field.key);
  }
  std::string near = nearest_name(key, same_leaf.empty() ? keys : same_leaf);
  if (near.empty() && !same_leaf.empty()) near = same_leaf.front();
  return near.empty() ? "" : fmt::format(", did you mean '{}'?", near);
}

}  // namespace trireme::plan
