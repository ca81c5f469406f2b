// trireme eval --data: loss, perplexity and bits a byte of a text.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/utf8.h"
#include "trireme/cli/corpus_text.h"
#include "trireme/cli/words.h"
#include "trireme/cli/worker_eval.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using report::Align;
using train::ScoredTokens;

constexpr size_t kEncodedAtOnce = size_t{1} << 20;  // encoded at once where a cut changes nothing

/// Counts and losses of a document, or of all.
struct TextScore {
  std::string name;
  int64_t bytes = 0, tokens = 0;
  double nats = 0.0;  ///< minus the log-likelihood of the tokens

  double loss() const { return nats / static_cast<double>(tokens); }
  double perplexity() const { return std::exp(loss()); }
  double bits_per_byte() const { return nats / std::numbers::ln2 / static_cast<double>(bytes); }
};

/// The documents of a text in windows that follow each other. A window is predicted from its own tokens and
/// the one before it, which for the first one separates documents, as in training.
class TextWindows {
 public:
  TextWindows(CorpusText& corpus, const data::Tokenizer& tokenizer, int64_t window)
      : corpus_(corpus), tokenizer_(tokenizer), window_(static_cast<size_t>(window)) {}

  std::optional<ScoredTokens> next() {
    while (!fill() && begin_document()) continue;
    const size_t count = std::min(window_ + 1, tokens_.size() - begin_);
    if (count < 2) return std::nullopt;
    const auto first = tokens_.begin() + static_cast<std::ptrdiff_t>(begin_);
    begin_ += count - 1;
    documents_.back().tokens += static_cast<int64_t>(count) - 1;
    document_of_.push_back(documents_.size() - 1);
    return ScoredTokens{.tokens = {first, first + static_cast<std::ptrdiff_t>(count)}, .from = 1};
  }

  /// Documents with what the windows so far have cost, in their order.
  std::vector<TextScore> with(const std::vector<double>& nats) const {
    std::vector<TextScore> scores = documents_;
    for (size_t i = 0; i < nats.size(); ++i) scores[document_of_[i]].nats += nats[i];
    return scores;
  }

 private:
  /// Whether the document has a token that is still to come; encodes as much of it as a window needs.
  bool fill() {
    const size_t limit = tokenizer_.cuts_anywhere() ? kEncodedAtOnce : rest_.size();
    while (!rest_.empty() && tokens_.size() - begin_ < window_ + 1) {
      tokens_.erase(tokens_.begin(), tokens_.begin() + static_cast<std::ptrdiff_t>(begin_));
      begin_ = 0;
      const std::vector<int32_t> ids = tokenizer_.encode(rest_.substr(0, limit));
      tokens_.insert(tokens_.end(), ids.begin(), ids.end());
      rest_.remove_prefix(std::min(limit, rest_.size()));
    }
    return tokens_.size() > begin_ + 1;
  }

  bool begin_document() {
    const auto document = corpus_.next();
    rest_ = document.value_or(std::string_view());
    if (!document) return false;
    if (!is_utf8(*document)) corpus_.note_not_utf8();
    index_ = corpus_.path() == path_ ? index_ + 1 : 1;
    path_ = corpus_.path();
    documents_.push_back({.name = index_ == 1 ? path_ : fmt::format("{} #{}", path_, index_),
                          .bytes = static_cast<int64_t>(document->size())});
    tokens_ = {tokenizer_.document_separator()};
    begin_ = 0;
    return true;
  }

  CorpusText& corpus_;
  const data::Tokenizer& tokenizer_;
  size_t window_;
  std::string path_;
  int64_t index_ = 0;            ///< of the document in its file, from 1
  std::string_view rest_;        ///< of the document, not yet encoded
  std::vector<int32_t> tokens_;  ///< those from begin_ on are still to come, but for the first one
  size_t begin_ = 0;
  std::vector<TextScore> documents_;
  std::vector<size_t> document_of_;  ///< by window
};

TextScore sum_of(const std::vector<TextScore>& documents) {
  TextScore all;
  for (const TextScore& document : documents) {
    all.bytes += document.bytes;
    all.tokens += document.tokens;
    all.nats += document.nats;
  }
  return all;
}

/// A document without tokens has no loss.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json();
}

Json to_json(const TextScore& score) {
  return {{"tokens", score.tokens},
          {"bytes", score.bytes},
          {"loss", number(score.loss())},
          {"perplexity", number(score.perplexity())},
          {"bits_per_byte", number(score.bits_per_byte())}};
}

std::string figure(double value) {
  return std::isfinite(value) ? fmt::format("{:.4f}", value) : "-";
}

void print_documents(const std::vector<TextScore>& documents) {
  report::Table table({{"tokens", Align::kRight},
                       {"bytes", Align::kRight},
                       {"loss", Align::kRight},
                       {"perplexity", Align::kRight},
                       {"bits/byte", Align::kRight},
                       {"document"}});
  for (const TextScore& document : documents) {
    table.add_row({with_commas(document.tokens), with_commas(document.bytes), figure(document.loss()),
                   figure(document.perplexity()), figure(document.bits_per_byte()),
                   printable_line(document.name)});
  }
  fmt::print("{}\n", table.to_string());
}

/// The documents that were read, and their scores.
struct Found {
  std::vector<TextScore> documents;
  TextScore all;
  const CorpusText& corpus;
};

void print_text_as_json(const Evaluation& evaluation, const Found& found) {
  Json document = header_of(evaluation);
  document["documents"] = found.documents.size();
  document.update(to_json(found.all));
  if (evaluation.options().per_document) {
    for (const TextScore& one : found.documents) {
      Json row{{"document", one.name}};
      row.update(to_json(one));
      document["per_document"].push_back(row);
    }
  }
  // Names of files may be no UTF-8, which JSON cannot hold.
  fmt::print("{}\n", document.dump(2, ' ', false, Json::error_handler_t::replace));
}

void print_text_figures(const Evaluation& evaluation, const Found& found) {
  const TextScore& all = found.all;
  if (evaluation.options().per_document) print_documents(found.documents);
  fmt::print("text        {}, {}, {}\n", counted(found.corpus.files(), "file"),
             counted(std::ssize(found.documents), "document"), bytes_text(all.bytes));
  fmt::print("tokens      {} by {}, in windows of {}\n", with_commas(all.tokens), evaluation.tokenizer.name(),
             with_commas(evaluation.options().window));
  fmt::print("loss        {:.4f} nats a token\nperplexity  {:.4f}\nbits/byte   {:.4f}\n", all.loss(),
             all.perplexity(), all.bits_per_byte());
}

void warn_of_bytes(const Evaluation& evaluation, const CorpusText& corpus) {
  const std::string note = corpus.not_utf8_note();
  if (note.empty()) return;
  log_warning(
      "{}; {}", note,
      evaluation.tokenizer.cuts_anywhere() ? "bytes are used as they are" : "such bytes are read as U+FFFD");
}

}  // namespace

void evaluate_text(const Evaluation& evaluation) {
  const EvalOptions& options = evaluation.options();
  CorpusText corpus({source_of(options.data)});
  TextWindows windows(corpus, evaluation.tokenizer, options.window);
  const std::vector<double> nats = score(evaluation, [&] { return windows.next(); });
  const std::vector<TextScore> documents = windows.with(nats);
  const Found found{documents, sum_of(documents), corpus};
  if (found.all.tokens == 0) {
    throw ConfigError("[cli.eval] {} has no token in {}; name a text that is not empty", options.data,
                      counted(std::ssize(documents), "document"));
  }
  if (!evaluation.speaks()) return;
  warn_of_bytes(evaluation, corpus);
  (evaluation.request.json ? print_text_as_json : print_text_figures)(evaluation, found);
}

}  // namespace trireme::cli
