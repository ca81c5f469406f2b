// trireme data train-tokenizer: byte-level BPE learned from texts.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/cores.h"
#include "trireme/base/descriptor.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/cli/corpus_text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/progress_line.h"
#include "trireme/cli/words.h"
#include "trireme/text/bpe_trainer.h"
#include "trireme/text/load.h"
#include "trireme/text/word_counts.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kTextBytes = size_t{1} << 20;  // a thread counts at once
constexpr const char* kUsualEnd = "<|endoftext|>";
constexpr const char* kUsualFile = "tokenizer.json";

struct TrainTokenizerOptions {
  std::vector<std::string> texts, special;
  std::string out;  ///< empty or a folder: kUsualFile there, which must not exist
  int64_t vocab = 4096;
  int64_t threads = usable_cores();
  bool json = false;
};

/// Hands a corpus out in texts of bounded size, and tells how far it has come.
class TextsOfCorpus {
 public:
  explicit TextsOfCorpus(CorpusText& corpus) : corpus_(corpus) {}

  std::optional<std::string> next() {
    while (rest_.empty()) {
      const auto document = corpus_.next();
      if (!document) return std::nullopt;
      rest_ = *document;
    }
    const size_t size = rest_.size() > kTextBytes ? text::cut_between_words(rest_, kTextBytes) : rest_.size();
    std::string part(rest_.substr(0, size));
    rest_.remove_prefix(size);
    if (!is_utf8(part)) corpus_.note_not_utf8();
    show_progress();
    return part;
  }

 private:
  void show_progress() {
    if (!line_.due()) return;
    const double done = static_cast<double>(corpus_.read_bytes()) - static_cast<double>(rest_.size());
    line_.show(fmt::format("counting words of {}, {} done", bytes_text(corpus_.bytes()),
                           percent(std::max(0.0, done) / static_cast<double>(corpus_.bytes()))));
  }

  CorpusText& corpus_;
  std::string_view rest_;  ///< of a document
  ProgressLine line_;
};

std::vector<text::WordCount> words_in(CorpusText& corpus, int64_t threads) {
  TextsOfCorpus texts(corpus);
  return text::count_words([&texts] { return texts.next(); }, threads);
}

/// A tokenizer without a token that ends documents would train nothing.
std::vector<std::string> special_tokens(std::vector<std::string> wanted) {
  if (std::ranges::none_of(wanted, text::ends_documents)) wanted.insert(wanted.begin(), kUsualEnd);
  return wanted;
}

/// Where the result goes. A file that the user has not named is not replaced.
std::string settle_out(const std::string& out) {
  std::error_code ignored;
  if (!out.empty() && !out.ends_with('/') && !fs::is_directory(out, ignored)) return out;
  const std::string file = (fs::path(out) / kUsualFile).string();
  if (!fs::exists(file, ignored)) return file;
  throw UsageError(fmt::format("[cli.data] {} exists already", file),
                   "name the file to write with --out FILE");
}

/// Makes the folder of `path` and tries to write there, so that hours of work do not end in an error.
void prepare_out(const std::string& path) {
  if (is_special_file(path)) return;
  const std::string target = follow_links(path);
  if (const fs::path folder = fs::path(target).parent_path(); !folder.empty())
    make_directories(folder.string());
  std::string trial = target + ".XXXXXX";
  const Descriptor file(::mkstemp(trial.data()));
  if (!file) {
    throw EnvironmentError("[cli.data] {} cannot be written: {}; name another file with --out FILE", path,
                           errno_text(errno));
  }
  ::unlink(trial.c_str());
}

text::TrainedBpe learn(const std::vector<text::WordCount>& words, const TrainTokenizerOptions& options) {
  ProgressLine line;
  const auto show = [&](int64_t tokens) {
    if (line.due())
      line.show(fmt::format("learning {} of {} tokens", with_commas(tokens), with_commas(options.vocab)));
  };
  return text::train_bpe(
      words, {.vocab_size = options.vocab, .special = special_tokens(options.special), .on_progress = show});
}

struct WordFigures {
  int64_t words = 0, bytes = 0;
};

WordFigures figures_of(const std::vector<text::WordCount>& words) {
  WordFigures figures;
  for (const auto& [word, count] : words) {
    figures.words += count;
    figures.bytes += count * static_cast<int64_t>(word.size());
  }
  return figures;
}

void say_shortage(const text::TrainedBpe& trained, int64_t vocab) {
  const auto tokens = static_cast<int64_t>(trained.tokens.size());
  if (tokens == vocab) return;
  log_warning(
      "the text has no more than {} merges, so there are {} tokens instead of {}; a longer text has more",
      with_commas(static_cast<int64_t>(trained.merges.size())), with_commas(tokens), with_commas(vocab));
}

int train_tokenizer(const TrainTokenizerOptions& options) {
  const std::string out = settle_out(options.out);
  text::train_bpe({},
                  {.vocab_size = options.vocab, .special = special_tokens(options.special)});  // may refuse
  std::vector<data::Source> sources;
  for (const std::string& path : options.texts) sources.push_back(source_of(path));
  CorpusText corpus(std::move(sources));
  prepare_out(out);
  const std::vector<text::WordCount> words = words_in(corpus, options.threads);
  if (words.empty()) {
    throw ConfigError("[cli.data] the texts ({}) have no words; name texts with more than lines {}",
                      bytes_text(corpus.bytes()), data::kSeparatorLine);
  }
  if (const std::string note = corpus.not_utf8_note(); !note.empty())
    log_warning("{}; such bytes are read as U+FFFD", note);
  const text::TrainedBpe trained = learn(words, options);
  say_shortage(trained, options.vocab);
  write_file_atomic(out, text::tokenizer_json(trained));
  const WordFigures figures = figures_of(words);
  const double bytes_per_token =
      static_cast<double>(figures.bytes) / static_cast<double>(trained.text_tokens);
  if (options.json) {
    const nlohmann::ordered_json document = {{"schema", "trireme.trained_tokenizer/1"},
                                             {"path", out},
                                             {"vocab_size", trained.tokens.size()},
                                             {"merges", trained.merges.size()},
                                             {"special", trained.special},
                                             {"files", corpus.files()},
                                             {"bytes", corpus.bytes()},
                                             {"not_utf8_files", corpus.not_utf8_files()},
                                             {"words", figures.words},
                                             {"distinct_words", words.size()},
                                             {"tokens", trained.text_tokens},
                                             {"bytes_per_token", bytes_per_token}};
    fmt::print("{}\n", document.dump(2));
    return 0;
  }
  log_info("{}, {}, {} words of which {} differ", counted(corpus.files(), "file"), bytes_text(corpus.bytes()),
           with_commas(figures.words), with_commas(static_cast<int64_t>(words.size())));
  fmt::print("{}: {} tokens, {} of them merged, {:.2f} bytes a token\n", out,
             with_commas(static_cast<int64_t>(trained.tokens.size())),
             with_commas(static_cast<int64_t>(trained.merges.size())), bytes_per_token);
  return 0;
}

}  // namespace

void add_data_train_tokenizer(CLI::App& data, Front& front) {
  auto options = std::make_shared<TrainTokenizerOptions>();
  CLI::App* verb = data.add_subcommand("train-tokenizer", "Learn a tokenizer (byte-level BPE) from texts");
  verb->add_option("TEXT", options->texts,
                   "Text files, JSON Lines (FILE.jsonl#FIELD), folders of them, or 'builtin'")
      ->required()
      ->option_text("...");
  verb->add_option("--vocab", options->vocab,
                   with_default("Tokens, special ones and 256 bytes included", options->vocab))
      ->option_text("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24));
  verb->add_option("--out", options->out, "File to write, or folder for a new tokenizer.json (default: here)")
      ->option_text("FILE");
  verb->add_option(
          "--special", options->special,
          "A special token, once for each; <|endoftext|> is one unless another of them ends documents")
      ->option_text("TOKEN")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  verb->add_option("--threads", options->threads, "Threads that count words (default: all cores)")
      ->option_text("N")
      ->check(CLI::Range(1, 1024));
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Words are cut as GPT-2 cuts them. The merges are those that Python's tokenizers learns, on any "
      "number\n"
      "of threads, unless a document has 1 MiB without white space behind a letter or sign of ASCII: there "
      "it\n"
      "is cut inside a word, once per MiB.\n"
      "Train with --data.tokenizer=FILE; 'trireme data inspect' shows what it makes of a text.\n"
      "Example:\n"
      "  trireme data train-tokenizer my_text/ --vocab 8192 --out my_tokenizer.json");
  verb->callback([options, &front] { front.action = [options] { return train_tokenizer(*options); }; });
}

}  // namespace trireme::cli
