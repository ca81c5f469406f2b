#include "trireme/cli/questions.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/text.h"

namespace trireme::cli {
namespace {

using nlohmann::json;

constexpr const char* kForm = R"(a question is {"prompt": "...", "choices": ["...", "..."], "answer": 0})";

/// A line of a file of questions.
struct FileLine {
  const std::string& path;
  int64_t line = 0;

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> reason, Args&&... args) const {
    throw DataError("[cli.questions] {}, line {}: {}; {}", path, line,
                    fmt::format(reason, std::forward<Args>(args)...), kForm);
  }
};

const json& field(const json& object, const char* name, const FileLine& place) {
  const auto found = object.find(name);
  if (found == object.end()) place.refuse("there is no field '{}'", name);
  return *found;
}

std::vector<std::string> choices_of(const json& list, const FileLine& place) {
  if (!list.is_array()) place.refuse("'choices' is no list");
  if (list.size() < 2) place.refuse("'choices' has {}, but two are the least", list.size());
  std::vector<std::string> choices;
  for (const json& choice : list) {
    if (!choice.is_string() || choice.get_ref<const std::string&>().empty())
      place.refuse("choice {} is {}", choices.size(), choice.is_string() ? "empty" : "no string");
    choices.push_back(choice.get<std::string>());
  }
  return choices;
}

Question question_of(std::string_view line, const FileLine& place) {
  const json object = json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) place.refuse("this is no JSON object");
  const json &prompt = field(object, "prompt", place), &answer = field(object, "answer", place);
  if (!prompt.is_string()) place.refuse("'prompt' is no string");
  Question question{.line = place.line,
                    .prompt = prompt.get<std::string>(),
                    .choices = choices_of(field(object, "choices", place), place)};
  if (!answer.is_number_integer()) place.refuse("'answer' is no whole number");
  const auto right = answer.get<int64_t>();
  if (right < 0 || right >= std::ssize(question.choices))
    place.refuse("'answer' is {}, but the {} choices are numbered from 0", right, question.choices.size());
  question.answer = static_cast<size_t>(right);
  return question;
}

void check_file(const std::string& path) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored))
    throw ConfigError("[cli.questions] {} is no file; name one of JSON Lines, in which {}", path, kForm);
  if (path.ends_with(".gz") || path.ends_with(".zst"))
    throw ConfigError("[cli.questions] {} is packed; unpack it, for example with gunzip or unzstd", path);
}

}  // namespace

std::vector<Question> read_questions(const std::string& path) {
  check_file(path);
  std::vector<Question> questions;
  FileLine place{path};
  for (const std::string& line : split(read_file(path), '\n')) {
    ++place.line;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    questions.push_back(question_of(line, place));
  }
  if (questions.empty()) throw ConfigError("[cli.questions] {} holds no question; {}", path, kForm);
  return questions;
}

}  // namespace trireme::cli
