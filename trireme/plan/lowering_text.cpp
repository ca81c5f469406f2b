// Stage programs as text, one line an action.
#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/plan/lowering.h"

namespace trireme::plan {
namespace {

using Kind = StageAction::Kind;

/// Passes have the letter of the schedule's text; of messages it says which kind travels.
struct Word {
  Kind kind;
  std::string_view word;
  char letter;
};
constexpr std::string_view kMessageLetters = "FBHPT";
static_assert(kMessageLetters.size() == kNames<Message>.size());
constexpr std::array<Word, 7> kWords = {{{Kind::kForward, "forward", 'F'},
                                         {Kind::kBackward, "backward", 'B'},
                                         {Kind::kBackwardInput, "backward_input", 'I'},
                                         {Kind::kBackwardWeight, "backward_weight", 'W'},
                                         {Kind::kSend, "send", '\0'},
                                         {Kind::kPost, "post", '\0'},
                                         {Kind::kTake, "take", '\0'}}};

bool is_message(Kind kind) {
  return kind == Kind::kSend || kind == Kind::kPost || kind == Kind::kTake;
}

/// The words of a line, one after the other.
class WordsOfLine {
 public:
  explicit WordsOfLine(std::string_view rest) : rest_(rest) {}
  std::string_view word() {
    const size_t begin = std::min(rest_.find_first_not_of(" \t\r"), rest_.size());
    rest_.remove_prefix(begin);
    const std::string_view found = rest_.substr(0, rest_.find_first_of(" \t\r"));
    rest_.remove_prefix(found.size());
    return found;
  }

 private:
  std::string_view rest_;
};

std::optional<int64_t> number_of(std::string_view text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || end != text.data() + text.size()) return std::nullopt;
  return number;
}

/// "2F3" into stage, micro-batch and letter.
std::optional<char> take_place(std::string_view text, StageAction& action) {
  const size_t letter = text.find_first_not_of("0123456789");
  if (letter == std::string_view::npos) return std::nullopt;
  const auto stage = number_of(text.substr(0, letter)), micro_batch = number_of(text.substr(letter + 1));
  if (!stage || !micro_batch) return std::nullopt;
  action.stage = *stage;
  action.micro_batch = *micro_batch;
  return text[letter];
}

bool take_number(WordsOfLine& line, std::string_view before, int64_t& number) {
  if (line.word() != before) return false;
  const auto found = number_of(line.word());
  if (found) number = *found;
  return found.has_value();
}

std::optional<StageAction> parse_action(std::string_view text) {
  WordsOfLine line(text);
  const std::string_view word = line.word();
  const auto* const known = std::ranges::find(kWords, word, &Word::word);
  if (known == kWords.end()) return std::nullopt;
  StageAction action{.kind = known->kind};
  const auto letter = take_place(line.word(), action);
  if (!letter) return std::nullopt;
  if (is_message(action.kind)) {
    const size_t message = kMessageLetters.find(*letter);
    if (message == std::string_view::npos) return std::nullopt;
    action.message = static_cast<Message>(message);
    if (!take_number(line, action.kind == Kind::kSend ? "to" : "from", action.peer)) return std::nullopt;
    if (action.kind != Kind::kSend && !take_number(line, "in", action.buffer)) return std::nullopt;
  } else if (*letter != known->letter) {
    return std::nullopt;
  }
  return line.word().empty() ? std::optional(action) : std::nullopt;
}

}  // namespace

char letter_of(Message message) {
  return kMessageLetters[static_cast<size_t>(message)];
}

std::string to_text(const StageAction& action) {
  const Word& known = *std::ranges::find(kWords, action.kind, &Word::kind);
  const bool message = is_message(action.kind);
  const char letter = message ? letter_of(action.message) : known.letter;
  std::string text = fmt::format("{} {}{}{}", known.word, action.stage, letter, action.micro_batch);
  if (message) text += fmt::format(" {} {}", action.kind == Kind::kSend ? "to" : "from", action.peer);
  if (message && action.kind != Kind::kSend) text += fmt::format(" in {}", action.buffer);
  return text;
}

std::string to_text(const StageProgram& program) {
  std::string text;
  for (const StageAction& action : program) text += to_text(action) + '\n';
  return text;
}

StageProgram program_from_text(std::string_view text) {
  StageProgram program;
  for (size_t number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(text.size(), end + 1));
    if (WordsOfLine(line).word().empty()) continue;
    const auto action = parse_action(line);
    if (!action) {
      throw ConfigError(
          "[plan.program_from_text] line {}: '{}' is not an action; write 'forward 2F3', 'send 2F3 to 1' or "
          "'take 2F3 from 1 in 0'",
          number, line.substr(0, 60));
    }
    program.push_back(*action);
  }
  return program;
}

}  // namespace trireme::plan
