// trireme eval --choices: how often the likeliest of several endings is the right one.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/cli/questions.h"
#include "trireme/cli/words.h"
#include "trireme/cli/worker_eval.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using report::Align;
using train::ScoredTokens;

/// A question and how likely its endings are.
struct AnsweredQuestion {
  const Question* question = nullptr;
  std::vector<double> log_likelihoods = {};

  size_t chosen() const { return best(log_likelihoods); }
  /// By the likelihood of a byte, so that long endings do not lose for their length.
  size_t chosen_by_bytes() const {
    std::vector<double> by_byte;
    for (size_t i = 0; i < log_likelihoods.size(); ++i)
      by_byte.push_back(log_likelihoods[i] / static_cast<double>(question->choices[i].size()));
    return best(by_byte);
  }

 private:
  /// The first of equals.
  static size_t best(const std::vector<double>& values) {
    return static_cast<size_t>(std::ranges::max_element(values) - values.begin());
  }
};

/// Prompts with one ending each, of which the tokens of the ending are scored.
class Endings {
 public:
  Endings(const std::vector<Question>& questions, const data::Tokenizer& tokenizer,
          const EvalOptions& options)
      : questions_(questions),
        tokenizer_(tokenizer),
        options_(options),
        most_(static_cast<size_t>(options.window) + 1) {}

  std::optional<ScoredTokens> next() {
    if (question_ == questions_.size()) return std::nullopt;
    ScoredTokens row = tokens_of(questions_[question_]);
    shorten(row);
    if (++choice_ == questions_[question_].choices.size()) {
      truncated_ += std::exchange(is_truncated_, false) ? 1 : 0;
      ++question_;
      choice_ = 0;
    }
    return row;
  }

  int64_t truncated() const { return truncated_; }  ///< questions

 private:
  /// An ending begins with the first token that is not one of the prompt alone: its first letters may be one
  /// token with the prompt's last.
  ScoredTokens tokens_of(const Question& question) const {
    const std::vector<int32_t> prompt = tokenizer_.encode(question.prompt),
                               whole = tokenizer_.encode(question.prompt + question.choices[choice_]);
    const auto differs = std::ranges::mismatch(prompt, whole).in2;
    if (differs == whole.end()) {
      throw DataError("[cli.eval] {}, line {}: the tokenizer {} drops all of choice {}", options_.data,
                      question.line, tokenizer_.name(), choice_);
    }
    ScoredTokens row{.tokens = {tokenizer_.document_separator()},
                     .from = static_cast<size_t>(differs - whole.begin()) + 1};
    row.tokens.insert(row.tokens.end(), whole.begin(), whole.end());
    return row;
  }

  /// Drops what of the beginning does not fit into the window.
  void shorten(ScoredTokens& row) {
    if (row.tokens.size() <= most_) return;
    const size_t dropped = row.tokens.size() - most_;
    if (row.from <= dropped) {
      throw ConfigError(
          "[cli.eval] {}, line {}: choice {} has {} tokens, but the window has {}; raise --window",
          options_.data, questions_[question_].line, choice_, row.tokens.size() - row.from, most_ - 1);
    }
    row.tokens.erase(row.tokens.begin(), row.tokens.begin() + static_cast<std::ptrdiff_t>(dropped));
    row.from -= dropped;
    is_truncated_ = true;
  }

  const std::vector<Question>& questions_;
  const data::Tokenizer& tokenizer_;
  const EvalOptions& options_;
  size_t most_;
  size_t question_ = 0, choice_ = 0;
  bool is_truncated_ = false;
  int64_t truncated_ = 0;
};

/// Counts over all questions.
struct Accuracy {
  int64_t questions = 0, right = 0, right_by_bytes = 0;
  double chance = 0.0;  ///< the accuracy of guessing

  double share(int64_t count) const { return static_cast<double>(count) / static_cast<double>(questions); }
};

Accuracy accuracy_of(const std::vector<AnsweredQuestion>& answered) {
  Accuracy all{.questions = std::ssize(answered)};
  for (const AnsweredQuestion& one : answered) {
    all.right += one.chosen() == one.question->answer ? 1 : 0;
    all.right_by_bytes += one.chosen_by_bytes() == one.question->answer ? 1 : 0;
    all.chance += 1.0 / static_cast<double>(one.log_likelihoods.size() * answered.size());
  }
  return all;
}

std::vector<AnsweredQuestion> answers_of(const std::vector<Question>& questions,
                                         const std::vector<double>& nats) {
  std::vector<AnsweredQuestion> answered;
  size_t row = 0;
  for (const Question& question : questions) {
    AnsweredQuestion& one = answered.emplace_back(&question);
    for (size_t i = 0; i < question.choices.size(); ++i) one.log_likelihoods.push_back(-nats[row++]);
  }
  return answered;
}

void print_questions(const std::vector<AnsweredQuestion>& answered) {
  report::Table table({{"line", Align::kRight},
                       {"answer", Align::kRight},
                       {"chosen", Align::kRight},
                       {"by bytes", Align::kRight},
                       {"log-likelihoods"}});
  for (const AnsweredQuestion& one : answered) {
    table.add_row({std::to_string(one.question->line), std::to_string(one.question->answer),
                   std::to_string(one.chosen()), std::to_string(one.chosen_by_bytes()),
                   fmt::format("{:.3f}", fmt::join(one.log_likelihoods, " "))});
  }
  fmt::print("{}\n", table.to_string());
}

void print_answers_as_json(const Evaluation& evaluation, const std::vector<AnsweredQuestion>& answered,
                           int64_t truncated) {
  const Accuracy all = accuracy_of(answered);
  Json document = header_of(evaluation);
  document.update({{"questions", all.questions},
                   {"accuracy", all.share(all.right)},
                   {"accuracy_by_bytes", all.share(all.right_by_bytes)},
                   {"chance", all.chance},
                   {"truncated", truncated}});
  if (evaluation.options().per_document) {
    for (const AnsweredQuestion& one : answered) {
      document["per_document"].push_back({{"line", one.question->line},
                                          {"answer", one.question->answer},
                                          {"chosen", one.chosen()},
                                          {"chosen_by_bytes", one.chosen_by_bytes()},
                                          {"log_likelihoods", one.log_likelihoods}});
    }
  }
  fmt::print("{}\n", document.dump(2, ' ', false, Json::error_handler_t::replace));
}

void print_answers(const Evaluation& evaluation, const std::vector<AnsweredQuestion>& answered,
                   int64_t truncated) {
  const Accuracy all = accuracy_of(answered);
  if (evaluation.options().per_document) print_questions(answered);
  fmt::print("questions   {}, of which guessing answers {:.4f}\n", with_commas(all.questions), all.chance);
  fmt::print("accuracy    {:.4f}, by the likelihood of a byte {:.4f}\n", all.share(all.right),
             all.share(all.right_by_bytes));
  if (truncated == 0) return;
  fmt::print("truncated   {} not fit in the window of {} with every ending, and lost the beginning\n",
             counted(truncated, "prompt") + (truncated == 1 ? " does" : " do"),
             with_commas(evaluation.options().window));
}

}  // namespace

void evaluate_questions(const Evaluation& evaluation) {
  const std::vector<Question> questions = read_questions(evaluation.options().data);
  Endings endings(questions, evaluation.tokenizer, evaluation.options());
  const std::vector<double> nats = score(evaluation, [&] { return endings.next(); });
  if (!evaluation.speaks()) return;
  (evaluation.request.json ? print_answers_as_json : print_answers)(evaluation, answers_of(questions, nats),
                                                                    endings.truncated());
}

}  // namespace trireme::cli
