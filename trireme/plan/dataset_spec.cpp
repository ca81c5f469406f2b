#include "trireme/plan/dataset_spec.h"

#include <fmt/format.h>

#include <array>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

constexpr std::string_view kWord = "dataset";
constexpr size_t kMostPath = 4096;  // bytes, as Linux has it

/// Bytes that are no part of a word of a program's text as they are. Two slashes begin a comment.
std::string escaped(std::string_view text) {
  std::string word;
  for (const char one : text) {
    const auto byte = static_cast<unsigned char>(one);
    const bool begins_comment = one == '/' && word.ends_with('/');
    if (byte <= 0x20 || byte == 0x7f || one == '%' || one == '"' || one == '\'' || one == '\\' ||
        begins_comment)
      word += fmt::format("%{:02X}", byte);
    else
      word += one;
  }
  return word;
}

/// None where a % is not followed by two digits.
std::optional<std::string> unescaped(std::string_view word) {
  std::string text;
  for (size_t i = 0; i < word.size(); ++i) {
    if (word[i] != '%') {
      text += word[i];
      continue;
    }
    const std::string_view digits = word.substr(i + 1, 2);
    const size_t begin = text.size();
    text.push_back('\0');
    for (const char digit : digits) {
      const size_t value = std::string_view("0123456789ABCDEF").find(digit);
      if (value == std::string_view::npos) return std::nullopt;
      text[begin] = static_cast<char>(static_cast<unsigned char>(text[begin]) * 16U + value);
    }
    if (digits.size() < 2) return std::nullopt;
    i += 2;
  }
  return text;
}

std::string path_fault(std::string_view what, const std::string& path) {
  if (path.empty()) return fmt::format("{} is empty; name a file or folder that workers can read", what);
  if (path.size() > kMostPath)
    return fmt::format("{} has {} bytes; name a path of at most {}", what, path.size(), kMostPath);
  return {};
}

/// Reads what stands behind the word "dataset".
class SpecReader {
 public:
  explicit SpecReader(const std::string& at) : at_(at) {}

  DatasetSpec read(std::span<const std::string> words) {
    for (const std::string& word : words) read_word(word);
    const std::string fault = dataset_fault(spec_);
    if (!fault.empty()) fail(fault);
    return spec_;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw ConfigError("[plan.dataset] {}: {}", at_, what);
  }

 private:
  void read_word(const std::string& word) {
    if (word.starts_with('#')) {
      spec_.place = path("#", word.substr(1));
      return;
    }
    const size_t equals = word.find('=');
    if (equals == std::string::npos)
      fail(fmt::format("'{}' says nothing of a dataset; write path=FOLDER seq_len=64 batch=32", word));
    const std::string key = word.substr(0, equals), value = word.substr(equals + 1);
    if (key == "path") {
      spec_.path = path(key, value);
    } else if (key == "tokenizer") {
      spec_.tokenizer = path(key, value);
    } else if (key == "seq_len") {
      spec_.seq_len = number<int64_t>(key, value);
    } else if (key == "batch") {
      spec_.batch = number<int64_t>(key, value);
    } else if (key == "seed") {
      spec_.seed = number<int64_t>(key, value);
    } else if (key == "val_fraction") {
      spec_.val_fraction = number<double>(key, value);
    } else if (key == "vocab_size") {
      spec_.vocab_size = number<int64_t>(key, value);
    } else {
      fail_unknown(key);
    }
  }

  std::string path(const std::string& key, const std::string& value) const {
    const std::optional<std::string> text = unescaped(value);
    if (!text) fail(fmt::format("{}={} has a % without two digits 0 to F behind it; write %25", key, value));
    return *text;
  }

  template <typename Number>
  Number number(const std::string& key, const std::string& value) const {
    const std::optional<Number> read = parse_whole_text<Number>(value);
    if (!read) fail(fmt::format("{}={} is no number; write batch=32", key, value));
    return *read;
  }

  [[noreturn]] void fail_unknown(const std::string& key) const {
    static const std::vector<std::string> kKeys = {"path", "tokenizer",    "seq_len",   "batch",
                                                   "seed", "val_fraction", "vocab_size"};
    const std::string near = nearest_name(key, kKeys);
    fail(fmt::format("a dataset has no '{}'{}", key,
                     near.empty() ? "; it has " + join(kKeys, ", ") : "; did you mean '" + near + "'?"));
  }

  const std::string& at_;
  DatasetSpec spec_;
};

}  // namespace

std::string dataset_fault(const DatasetSpec& spec) {
  for (const auto& [what, path] :
       {std::pair<std::string_view, const std::string&>{"path", spec.path}, {"tokenizer", spec.tokenizer}}) {
    const std::string fault = path_fault(what, path);
    if (!fault.empty()) return fault;
  }
  if (spec.place.size() > kMostPath)
    return fmt::format("its place has {} bytes; give at most {}", spec.place.size(), kMostPath);
  constexpr int64_t kMost = 100'000'000;  // as of data.seq_len
  if (spec.seq_len < 1 || spec.seq_len > kMost)
    return fmt::format("seq_len is {}; give 1 to {} tokens", spec.seq_len, kMost);
  if (spec.batch < 1 || spec.batch > kMost)
    return fmt::format("batch is {}; give 1 to {} rows", spec.batch, kMost);
  if (!(spec.val_fraction >= 0.0 && spec.val_fraction < 1.0))
    return fmt::format("val_fraction is {}; give 0 up to below 1", spec.val_fraction);
  if (spec.vocab_size < 0) return fmt::format("vocab_size is {}; give that of the model", spec.vocab_size);
  return {};
}

std::string batch_fault(const DatasetSpec& spec, int64_t step) {
  const int64_t steps = std::numeric_limits<int64_t>::max() / spec.batch;
  if (0 <= step && step < steps) return {};
  return fmt::format("there is no batch {}; batches are numbered from 0 to {}", step, steps - 1);
}

std::string to_text(const DatasetSpec& spec) {
  std::string text =
      fmt::format("{} path={} tokenizer={} seq_len={} batch={} seed={} val_fraction={} vocab_size={}", kWord,
                  escaped(spec.path), escaped(spec.tokenizer), spec.seq_len, spec.batch, spec.seed,
                  spec.val_fraction, spec.vocab_size);
  if (!spec.place.empty()) text += " #" + escaped(spec.place);
  return text;
}

DatasetSpec dataset_from_text(std::string_view text, const std::string& at) {
  const std::vector<std::string> words = words_of(text);
  SpecReader reader(at);
  if (words.empty() || words.front() != kWord)
    reader.fail("a dataset is written 'dataset path=FOLDER seq_len=64 batch=32'");
  return reader.read(std::span(words).subspan(1));
}

}  // namespace trireme::plan
