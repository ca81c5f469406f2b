// trireme data inspect: the tokens that training would read from a text.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <span>

#include "trireme/base/cores.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/cli/corpus_text.h"
#include "trireme/cli/data_inspect_chat.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/front.h"
#include "trireme/cli/progress_line.h"
#include "trireme/cli/words.h"
#include "trireme/data/encode_ahead.h"
#include "trireme/data/tokenizer.h"
#include "trireme/plan/config.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kPieceBytes = size_t{1} << 20;  // encoded at once where a cut changes nothing
constexpr size_t kMostFrequent = 10;             // tokens that are listed

struct InspectOptions {
  std::string path;
  int64_t windows = 2;
  bool json = false;
};

struct LongestDocument {
  std::string file;
  int64_t index = 0;  ///< among all documents
  int64_t bytes = 0, tokens = 0;
};

/// What a tokenizer makes of a corpus.
struct Inspection {
  int64_t documents = 0, bytes = 0, tokens = 0, unknown = 0, special = 0;
  std::vector<int64_t> counts;  ///< by id
  LongestDocument longest;      ///< in tokens
  std::vector<int32_t> begin;   ///< the first tokens, with separators between documents

  /// Ids that occur, the most frequent first.
  std::vector<int32_t> by_frequency() const {
    std::vector<int32_t> ids;
    for (size_t id = 0; id < counts.size(); ++id) {
      if (counts[id] > 0) ids.push_back(static_cast<int32_t>(id));
    }
    std::ranges::stable_sort(ids, std::greater(),
                             [this](int32_t id) { return counts[static_cast<size_t>(id)]; });
    return ids;
  }
};

class Inspector {
 public:
  Inspector(CorpusText& corpus, const data::Tokenizer& tokenizer, size_t most_shown)
      : corpus_(corpus),
        tokenizer_(tokenizer),
        most_shown_(most_shown),
        encode_(tokenizer, usable_cores(), [this] { show_progress(); }) {
    result_.counts.resize(static_cast<size_t>(tokenizer.vocab_size()));
  }

  Inspection run() {
    while (const auto document = corpus_.next()) add(*document);
    encode_.finish();
    for (size_t id = 0; id < result_.counts.size(); ++id) {
      const auto token = static_cast<int32_t>(id);
      if (tokenizer_.unknown_token() == token) result_.unknown = result_.counts[id];
      if (tokenizer_.is_special(token)) result_.special += result_.counts[id];
    }
    return std::move(result_);
  }

 private:
  void add(std::string_view document) {
    if (!is_utf8(document)) corpus_.note_not_utf8();
    const auto current = std::make_shared<LongestDocument>(
        LongestDocument{.file = corpus_.path(), .bytes = static_cast<int64_t>(document.size())});
    const size_t limit = tokenizer_.cuts_anywhere() ? kPieceBytes : document.size();
    bool begins = true;
    data::for_each_piece(document, limit, [&](std::string_view piece) {
      encode_.add(piece, [this, current, begins](std::span<const int32_t> ids) {
        if (begins && result_.documents > 0) show(std::array{tokenizer_.document_separator()});
        take(*current, ids);
      });
      begins = false;
    });
    encode_.add({}, [this, current](auto) { end(*current); });
    show_progress();
  }

  void take(LongestDocument& document, std::span<const int32_t> ids) {
    for (const int32_t id : ids) ++result_.counts[static_cast<size_t>(id)];
    show(ids);
    document.tokens += static_cast<int64_t>(ids.size());
  }

  void end(LongestDocument& document) {
    document.index = result_.documents;
    result_.documents += 1;
    result_.bytes += document.bytes;
    result_.tokens += document.tokens;
    if (document.tokens > result_.longest.tokens) result_.longest = document;
  }

  void show_progress() {
    if (line_.due())
      line_.show(
          fmt::format("{} of {} tokenised", bytes_text(corpus_.read_bytes()), bytes_text(corpus_.bytes())));
  }

  void show(std::span<const int32_t> ids) {
    const size_t room = most_shown_ - result_.begin.size();
    result_.begin.insert(result_.begin.end(), ids.begin(),
                         ids.begin() + static_cast<std::ptrdiff_t>(std::min(room, ids.size())));
  }

  CorpusText& corpus_;
  const data::Tokenizer& tokenizer_;
  size_t most_shown_;
  Inspection result_;
  ProgressLine line_;
  data::EncodeAhead encode_;  // last: it stops before what takes its ids goes
};

/// The text of each token, as it stands behind the one before it.
std::vector<std::string> texts_of(const data::Tokenizer& tokenizer, std::span<const int32_t> ids) {
  std::vector<std::string> texts;
  for (size_t i = 0; i < ids.size(); ++i) {
    const bool follows = i > 0 && !tokenizer.is_special(ids[i - 1]);
    texts.push_back(tokenizer.is_special(ids[i])
                        ? tokenizer.special_text(ids[i])
                        : data::decode_after(tokenizer, ids.subspan(follows ? i - 1 : i, follows ? 1 : 0),
                                             ids.subspan(i, 1)));
  }
  return texts;
}

/// A token on one line: line breaks and tabs as in C.
std::string on_a_line(const std::string& text) {
  std::string line;
  for (const char byte : text) {
    switch (byte) {
      case '\n':
        line += "\\n";
        break;
      case '\r':
        line += "\\r";
        break;
      case '\t':
        line += "\\t";
        break;
      case '|':
        line += "\\|";
        break;
      default:
        line += byte;
    }
  }
  return printable_line(line);
}

/// "The| cat|\n".
std::string with_boundaries(const std::vector<std::string>& texts) {
  std::vector<std::string> lines;
  for (const std::string& text : texts) lines.push_back(on_a_line(text));
  return join(lines, "|");
}

/// The texts of the first windows of `seq_len` tokens; the last one may be shorter.
std::vector<std::vector<std::string>> windows_of(const Inspection& found, const data::Tokenizer& tokenizer,
                                                 size_t seq_len) {
  const std::vector<std::string> texts = texts_of(tokenizer, found.begin);
  std::vector<std::vector<std::string>> windows;
  for (size_t i = 0; i < texts.size(); i += seq_len) {
    const size_t end = std::min(i + seq_len, texts.size());
    windows.emplace_back(texts.begin() + static_cast<std::ptrdiff_t>(i),
                         texts.begin() + static_cast<std::ptrdiff_t>(end));
  }
  return windows;
}

double share_of(int64_t part, int64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

/// "'\n' 3.1%, ...".
std::string frequent_text(const Inspection& found, const data::Tokenizer& tokenizer) {
  std::vector<std::string> parts;
  for (const int32_t id : found.by_frequency()) {
    if (parts.size() == kMostFrequent) break;
    parts.push_back(fmt::format("'{}' {}", on_a_line(texts_of(tokenizer, {&id, 1}).front()),
                                percent(share_of(found.counts[static_cast<size_t>(id)], found.tokens))));
  }
  return join(parts, ", ");
}

/// Unknown tokens may be many, or a few of millions.
std::string share_text(int64_t part, int64_t whole, const char* what) {
  const std::string share = percent(share_of(part, whole));
  return fmt::format("{} {} ({})", with_commas(part), what,
                     part > 0 && share == "0.0%" ? "below 0.1%" : share);
}

void print_text(const Inspection& found, const CorpusText& corpus, const data::Tokenizer& tokenizer,
                const std::vector<std::vector<std::string>>& windows) {
  const auto used = static_cast<int64_t>(found.by_frequency().size());
  fmt::print("text       {}, {}, {}\n", counted(corpus.files(), "file"), counted(found.documents, "document"),
             bytes_text(found.bytes));
  fmt::print("tokenizer  {}, {} tokens, {} of them used\n", tokenizer.name(),
             with_commas(tokenizer.vocab_size()), with_commas(used));
  fmt::print("tokens     {}, {:.2f} bytes a token\n", with_commas(found.tokens),
             share_of(found.bytes, found.tokens));
  fmt::print("           {}, {}\n", share_text(found.unknown, found.tokens, "unknown"),
             share_text(found.special, found.tokens, "special"));
  fmt::print("frequent   {}\n", frequent_text(found, tokenizer));
  fmt::print("longest    document {} with {}, {}, in {}\n", with_commas(found.longest.index),
             counted(found.longest.tokens, "token"), bytes_text(found.longest.bytes), found.longest.file);
  for (size_t i = 0; i < windows.size(); ++i) fmt::print("window {}   {}\n", i, with_boundaries(windows[i]));
}

void print_json(const Inspection& found, const CorpusText& corpus, const data::Tokenizer& tokenizer,
                const std::vector<std::vector<std::string>>& windows) {
  Json frequent = Json::array();
  const std::vector<int32_t> ids = found.by_frequency();
  for (const int32_t id : std::span(ids).first(std::min(kMostFrequent, ids.size()))) {
    frequent.push_back({{"id", id},
                        {"text", texts_of(tokenizer, {&id, 1}).front()},
                        {"count", found.counts[static_cast<size_t>(id)]}});
  }
  const Json document = {{"schema", "trireme.text/1"},
                         {"tokenizer", tokenizer.name()},
                         {"vocab_size", tokenizer.vocab_size()},
                         {"used", ids.size()},
                         {"files", corpus.files()},
                         {"not_utf8_files", corpus.not_utf8_files()},
                         {"documents", found.documents},
                         {"bytes", found.bytes},
                         {"tokens", found.tokens},
                         {"bytes_per_token", share_of(found.bytes, found.tokens)},
                         {"unknown", found.unknown},
                         {"special", found.special},
                         {"frequent", frequent},
                         {"longest",
                          {{"file", found.longest.file},
                           {"document", found.longest.index},
                           {"bytes", found.longest.bytes},
                           {"tokens", found.longest.tokens}}},
                         {"windows", windows}};
  // Tokens may be parts of characters, which JSON cannot hold.
  fmt::print("{}\n", document.dump(2, ' ', false, Json::error_handler_t::replace));
}

int inspect(const InspectOptions& options, const Front& front) {
  plan::ResolvedConfig resolved =
      plan::load({.path = "", .text = "", .overrides = front.overrides}, front.environment);
  settle_tokenizer(resolved, "");
  const plan::DataConfig& config = resolved.config.data;
  const auto seq_len = static_cast<size_t>(config.seq_len);
  const auto tokenizer = data::make_tokenizer(config.tokenizer);
  if (config.format != plan::DataFormat::kText) {
    inspect_conversations(options.path, config, *tokenizer, options.json);
    return 0;
  }
  CorpusText corpus({source_of(options.path)});
  const Inspection found =
      Inspector(corpus, *tokenizer, static_cast<size_t>(options.windows) * seq_len).run();
  if (found.documents == 0) {
    throw ConfigError("[cli.data] {} ({}) has no documents; name a text with more than lines {}",
                      options.path, bytes_text(corpus.bytes()), data::kSeparatorLine);
  }
  if (const std::string note = corpus.not_utf8_note(); !note.empty()) {
    log_warning("{}; {}", note,
                tokenizer->cuts_anywhere() ? "bytes are used as they are" : "such bytes are read as U+FFFD");
  }
  const auto windows = windows_of(found, *tokenizer, seq_len);
  (options.json ? print_json : print_text)(found, corpus, *tokenizer, windows);
  return 0;
}

}  // namespace

void add_data_inspect(CLI::App& data, Front& front) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* verb = data.add_subcommand("inspect", "Show the tokens that training would read from a text");
  verb->add_option("PATH", options->path,
                   "A text file, JSON Lines (FILE.jsonl#FIELD), a folder of them, or 'builtin'")
      ->required()
      ->option_text(" ");
  verb->add_option("--windows", options->windows,
                   with_default("First windows that are shown", options->windows))
      ->option_text("N")
      ->check(CLI::Range(0, 1000));
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "A window has data.seq_len tokens, with | between two; validation takes its share of the text later.\n"
      "With data.format=chat or answers the first conversation is shown, and which of it counts in the "
      "loss.\n"
      "The config keys data.tokenizer, data.seq_len, data.format and data.chat_template can be given as\n"
      "--section.key=value.\n"
      "Example:\n"
      "  trireme data inspect my_text/ --data.tokenizer=tokenizer.json");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return inspect(*options, front); }; });
}

}  // namespace trireme::cli
