#include "trireme/data/corpus.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <set>

#include "tests/data/scratch.h"
#include "tests/data/tokenizer_fixture.h"
#include "tests/data/tokens.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/text/load.h"

namespace trireme::data {
namespace {

using namespace std::string_literals;
using testing::Scratch;

CorpusOptions corpus_options_for(const Scratch& scratch, const std::string& name, double val_fraction = 0.0) {
  return {.path = scratch.path(name),
          .val_fraction = val_fraction,
          .cache_dir = scratch.path("cache"),
          .seq_len = 1};
}

std::string train_text(const PreparedCorpus& corpus) {
  return testing::read_text(corpus.folder, "train");
}
std::string val_text(const PreparedCorpus& corpus) {
  return testing::read_text(corpus.folder, "val");
}

/// A TinyStories-like text of `count` different documents.
std::string stories(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += fmt::format("Once upon a time {}.\n<|endoftext|>\n", i);
  return text;
}

/// The same as packed text.
std::string text_without_separators(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) text += (i > 0 ? "\0"s : "") + fmt::format("Once upon a time {}.\n", i);
  return text;
}

std::set<std::string> documents(const std::string& text) {
  const std::vector<std::string> parts = trireme::split(text, '\0');
  return {parts.begin(), parts.end()};
}

TEST(PrepareCorpus, JoinsDocumentsInOrderWithOneZeroByteBetween) {
  const Scratch scratch;
  scratch.write("t/b", "second");
  scratch.write("t/a", "first");
  scratch.write("t/sub/c", "third");
  const PreparedCorpus corpus = prepare_corpus(corpus_options_for(scratch, "t"));
  EXPECT_EQ(train_text(corpus), "first\0second\0third"s);
  EXPECT_EQ(corpus.train_tokens, 18);
  EXPECT_EQ(corpus.val_tokens, 0);
  EXPECT_FALSE(corpus.from_cache);
  EXPECT_EQ(corpus.description, "3 files, 16 B, byte tokens");
}

TEST(PrepareCorpus, KeepsEveryByteOfTextThatIsNotUtf8AndSaysSoEachTime) {
  const Scratch scratch;
  std::string bytes;
  for (int i = 0; i < 256; ++i) bytes += static_cast<char>(i);
  scratch.write("t/a-fine", "caf\xc3\xa9");
  scratch.write("t/b-latin1", "caf\xe9");
  scratch.write("t/c-binary", bytes);
  for (const bool again : {false, true}) {
    const PreparedCorpus corpus = prepare_corpus(corpus_options_for(scratch, "t"));
    EXPECT_EQ(corpus.from_cache, again);
    EXPECT_EQ(train_text(corpus), "caf\xc3\xa9\0caf\xe9\0"s + bytes);
    EXPECT_TRUE(
        corpus.note.starts_with("2 of 3 files are not UTF-8, the first is " + scratch.path("t/b-latin1")))
        << corpus.note;
  }
  EXPECT_EQ(prepare_corpus(corpus_options_for(scratch, "t/a-fine")).note, "");
}

TEST(PrepareCorpus, CutsASingleDocumentInTheRatio) {
  const Scratch scratch;
  scratch.write("story", std::string(950, 'a') + std::string(50, 'b'));
  const PreparedCorpus corpus = prepare_corpus(corpus_options_for(scratch, "story", 0.05));
  EXPECT_EQ(train_text(corpus), std::string(950, 'a'));
  EXPECT_EQ(val_text(corpus), std::string(50, 'b'));
  EXPECT_EQ(corpus.description, "1 file, 1000 B, byte tokens");
}

TEST(PrepareCorpus, SplitsTinyStoriesTextIntoItsDocuments) {
  const Scratch scratch;
  scratch.write("stories.txt", "one\n<|endoftext|>\ntwo\n<|endoftext|>\nthree\n");
  const PreparedCorpus corpus = prepare_corpus(corpus_options_for(scratch, "stories.txt"));
  EXPECT_EQ(train_text(corpus), "one\n\0two\n\0three\n"s);
  EXPECT_EQ(corpus.description, "1 file, 3 documents, 42 B, byte tokens");
}

TEST(PrepareCorpus, PutsEveryDocumentIntoExactlyOneSplitButTheOneThatIsCut) {
  const Scratch scratch;
  scratch.write("stories.txt", stories(2000));
  const PreparedCorpus corpus = prepare_corpus(corpus_options_for(scratch, "stories.txt", 0.1));
  const std::set<std::string> train = documents(train_text(corpus)), val = documents(val_text(corpus));
  const std::set<std::string> wanted = documents(text_without_separators(2000));
  std::set<std::string> cut;
  for (const auto& split : {train, val}) {
    for (const std::string& document : split) {
      if (!wanted.contains(document)) cut.insert(document);
    }
  }
  EXPECT_EQ(train.size() + val.size(), 2000 + cut.size() / 2);
  ASSERT_TRUE(cut.empty() || cut.size() == 2) << cut.size();
  if (cut.size() == 2) {
    const std::string first = train.contains(*cut.begin()) ? *cut.begin() : *cut.rbegin();
    const std::string rest = train.contains(*cut.begin()) ? *cut.rbegin() : *cut.begin();
    EXPECT_TRUE(wanted.contains(first + rest)) << first << "|" << rest;
  }
}

TEST(PrepareCorpus, HoldsOutTheShareOfBytesThatWasAskedFor) {
  const std::vector<std::vector<size_t>> corpora = {
      {100'000}, {500'000, 12'000}, {12'000, 500'000}, {1, 1, 99'998}};
  for (const std::vector<size_t>& sizes : corpora) {
    for (const double fraction : {0.02, 0.1, 0.5}) {
      const Scratch scratch;
      size_t bytes = 0;
      for (size_t i = 0; i < sizes.size(); ++i) {
        scratch.write(fmt::format("t/{}", i), std::string(sizes[i], static_cast<char>('a' + i)));
        bytes += sizes[i];
      }
      const PreparedCorpus corpus = prepare_corpus(corpus_options_for(scratch, "t", fraction));
      const auto texts = static_cast<double>(sizes.size());  // of which separators are one token fewer
      EXPECT_NEAR(static_cast<double>(corpus.val_tokens), fraction * static_cast<double>(bytes), texts)
          << sizes.size() << " files, " << fraction;
      EXPECT_NEAR(static_cast<double>(corpus.train_tokens + corpus.val_tokens), static_cast<double>(bytes),
                  texts);
    }
  }
}

TEST(PrepareCorpus, CutsBetweenTwoCharacters) {
  std::string text;
  for (int i = 0; i < 50; ++i) text += "\u00e9\u20ac\U0001f6a3";  // 9 bytes
  for (int percent = 1; percent < 50; ++percent) {
    const Scratch scratch;
    scratch.write("text", text);
    const PreparedCorpus corpus = prepare_corpus(corpus_options_for(scratch, "text", percent / 100.0));
    EXPECT_TRUE(is_utf8(train_text(corpus)) && is_utf8(val_text(corpus))) << percent;
    EXPECT_EQ(train_text(corpus) + val_text(corpus), text);
    EXPECT_NEAR(static_cast<double>(corpus.val_tokens), 4.5 * percent, 3.5);
  }
}

/// Growth of a corpus moves the end of what is held out, never the order in which it is.
TEST(PrepareCorpus, MovesNoDocumentAgainstTheOthersWhenFilesAreAdded) {
  const Scratch scratch;
  const auto add_files = [&](int begin, int end) {
    for (int i = begin; i < end; ++i) scratch.write(fmt::format("t/{}", i), fmt::format("document {}", i));
  };
  const auto held_out = [&](double fraction) {
    return documents(val_text(prepare_corpus(corpus_options_for(scratch, "t", fraction))));
  };
  add_files(100, 300);
  const std::set<std::string> before = held_out(0.2);
  add_files(300, 500);
  const std::set<std::string> after = held_out(0.2), more = held_out(0.25);
  EXPECT_EQ(before.size(), 40u);
  EXPECT_EQ(after.size(), 80u);
  int of_the_old = 0;
  for (const std::string& document : before) of_the_old += after.contains(document);
  EXPECT_GE(of_the_old, 26) << "five standard deviations of the threshold";
  for (const std::string& document : after) EXPECT_TRUE(more.contains(document)) << document;
}

TEST(PrepareCorpus, GivesTheSameBytesTwice) {
  const Scratch scratch;
  scratch.write("stories.txt", stories(500));
  CorpusOptions options = corpus_options_for(scratch, "stories.txt", 0.1);
  const PreparedCorpus first = prepare_corpus(options);
  options.cache_dir = scratch.path("another-cache");
  const PreparedCorpus second = prepare_corpus(options);
  EXPECT_FALSE(second.from_cache);
  for (const char* file : {"/index.json", "/train-00000.tokens", "/val-00000.tokens"}) {
    EXPECT_EQ(testing::slurp(first.folder + file), testing::slurp(second.folder + file)) << file;
  }
}

TEST(PrepareCorpus, FindsTheCorpusInTheCache) {
  const Scratch scratch;
  scratch.write("stories.txt", stories(50));
  const PreparedCorpus first = prepare_corpus(corpus_options_for(scratch, "stories.txt", 0.1));
  const auto written = std::filesystem::last_write_time(first.folder + "/index.json");
  const PreparedCorpus second = prepare_corpus(corpus_options_for(scratch, "stories.txt", 0.1));
  EXPECT_TRUE(second.from_cache);
  EXPECT_EQ(second.folder, first.folder);
  EXPECT_EQ(second.description, first.description);
  EXPECT_EQ(second.train_tokens, first.train_tokens);
  EXPECT_EQ(second.val_tokens, first.val_tokens);
  EXPECT_EQ(std::filesystem::last_write_time(second.folder + "/index.json"), written);
}

TEST(PrepareCorpus, NoticesEditsEvenOfTheSameSize) {
  const Scratch scratch;
  const std::string path = scratch.write("text", "aaaaaaaaaa");
  const PreparedCorpus first = prepare_corpus(corpus_options_for(scratch, "text"));
  const auto before = std::filesystem::last_write_time(path);
  scratch.write("text", "bbbbbbbbbb");
  std::filesystem::last_write_time(path, before + std::chrono::milliseconds(1));
  const PreparedCorpus second = prepare_corpus(corpus_options_for(scratch, "text"));
  EXPECT_NE(second.folder, first.folder);
  EXPECT_EQ(train_text(second), "bbbbbbbbbb");
}

TEST(PrepareCorpus, KeysByFractionAndPath) {
  const Scratch scratch;
  scratch.write("a/text", stories(20));
  std::filesystem::copy(scratch.path("a"), scratch.path("b"));
  std::set<std::string> folders;
  for (const char* name : {"a", "b", "a/text"}) {
    for (const double fraction : {0.0, 0.1})
      folders.insert(prepare_corpus(corpus_options_for(scratch, name, fraction)).folder);
  }
  EXPECT_EQ(folders.size(), 6u);
}

std::vector<int64_t> widened(const std::vector<int32_t>& ids) {
  return {ids.begin(), ids.end()};
}

TEST(PrepareCorpus, PutsTheEndTokenOfATokenizerBetweenDocuments) {
  const Scratch scratch;
  scratch.write("stories", "Once upon a time.\nThe end.\n<|endoftext|>\nAnother one.\n");
  CorpusOptions options = corpus_options_for(scratch, "stories");
  const PreparedCorpus bytes = prepare_corpus(options);
  options.tokenizer = testing::kLlama2;
  const PreparedCorpus corpus = prepare_corpus(options);
  const text::Tokenizer tokenizer = text::load_tokenizer(testing::kLlama2);
  std::vector<int32_t> wanted = tokenizer.encode("Once upon a time.\nThe end.\n");
  wanted.push_back(*tokenizer.find("</s>"));
  const std::vector<int32_t> second = tokenizer.encode("Another one.\n");
  wanted.insert(wanted.end(), second.begin(), second.end());
  EXPECT_EQ(testing::read_tokens(corpus.folder, "train"), widened(wanted));
  EXPECT_EQ(corpus.vocab_size, tokenizer.vocab_size());
  EXPECT_NE(corpus.folder, bytes.folder);
  EXPECT_EQ(corpus.description,
            fmt::format("1 file, 2 documents, 54 B, {} tokens", corpus.tokenizer->name()));
  // The files count, and not their names.
  options.tokenizer = scratch.write("mine.json", testing::slurp(testing::kLlama2));
  EXPECT_TRUE(prepare_corpus(options).from_cache);
  options.tokenizer = scratch.write("mine.json", testing::slurp(testing::kLlama2) + "\n");
  EXPECT_FALSE(prepare_corpus(options).from_cache);
}

TEST(PrepareCorpus, WritesTheSameBytesOnAnyNumberOfThreads) {
  const Scratch scratch;
  for (int file = 0; file < 4; ++file) {
    std::string text;
    for (int i = 0; i < 6000; ++i) {
      text += fmt::format("{} strokes of boat {}\n", i * 31, file);
      if (i % 50 == 0 && file != 2) text += "<|endoftext|>\n";
    }
    scratch.write(fmt::format("t/{}", file), text);
  }
  for (const std::string& tokenizer : {std::string("byte"), testing::kLlama2}) {
    std::vector<std::string> first;
    for (const int64_t threads : {1, 2, 5}) {
      CorpusOptions options = corpus_options_for(scratch, "t", 0.1);
      options.tokenizer = tokenizer;
      options.threads = threads;
      options.cache_dir = scratch.path(fmt::format("cache{}", threads));
      const std::string folder = prepare_corpus(options).folder;
      std::vector<std::string> files;
      for (const char* name : {"index.json", "train-00000.tokens", "val-00000.tokens"})
        files.push_back(testing::slurp(folder + "/" + name));
      if (first.empty()) first = files;
      EXPECT_TRUE(files == first) << threads << " threads, " << tokenizer;
    }
  }
}

/// Nothing else could be told while a single text is tokenised.
TEST(PrepareCorpus, ShowsLifeWhileItTokenisesOneHugeDocument) {
  const Scratch scratch;
  std::string text;
  for (int i = 0; text.size() < (size_t{12} << 20); ++i) text += fmt::format("{} strokes in time\n", i);
  scratch.write("text", text);
  CorpusOptions options = corpus_options_for(scratch, "text");
  options.tokenizer = testing::kLlama2;
  int64_t beats = 0;
  const auto size = static_cast<int64_t>(text.size());
  options.on_progress = [&](const Progress& progress) { beats += progress.done == size; };
  prepare_corpus(options);
  EXPECT_GT(beats, 5) << "while all of the document was still to be packed";
}

/// Wherever it were cut, there would be other ids at the seam.
TEST(PrepareCorpus, TokenisesADocumentAsAWholeHoweverLong) {
  const Scratch scratch;
  std::string text;
  for (int i = 0; text.size() < (size_t{5} << 18); ++i) text += fmt::format("{} strokes in time\n", i);
  scratch.write("text", text);
  CorpusOptions options = corpus_options_for(scratch, "text");
  options.tokenizer = testing::kLlama2;
  EXPECT_EQ(testing::read_tokens(prepare_corpus(options).folder, "train"),
            widened(text::load_tokenizer(testing::kLlama2).encode(text)));
}

TEST(PrepareCorpus, ReadsTheBuiltinFolder) {
  const Scratch scratch;
  scratch.write("include/a.h", "#pragma once\n");
  CorpusOptions options = corpus_options_for(scratch, "");
  options.path = "builtin";
  options.builtin_root = scratch.path("include");
  EXPECT_EQ(train_text(prepare_corpus(options)), "#pragma once\n");
}

TEST(PrepareCorpus, CrossesChunksAndKeepsTheTextWhole) {
  const Scratch scratch;
  std::string text;  // three chunks of 1 Mi tokens, one line longer than a piece
  for (int i = 0; text.size() < (size_t{5} << 19); ++i) text += fmt::format("{} ", i);
  for (int i = 0; text.size() < (size_t{5} << 19) + 300'000; ++i) text += fmt::format("{}\n", i);
  scratch.write("text", text);
  EXPECT_EQ(train_text(prepare_corpus(corpus_options_for(scratch, "text"))), text);
}

TEST(PrepareCorpus, TellsHowFarItHasCome) {
  const Scratch scratch;
  scratch.write("t/a", std::string(40 << 20, 'x'));
  scratch.write("t/b", "the end");
  CorpusOptions options = corpus_options_for(scratch, "t", 0.1);
  std::vector<Progress> told;
  options.on_progress = [&](const Progress& progress) { told.push_back(progress); };
  prepare_corpus(options);
  const int64_t bytes = (int64_t{40} << 20) + 7;
  EXPECT_EQ(told.back().done, 2 * bytes) << "each byte is read once to choose and once to pack";
  EXPECT_EQ(told.back().total, 2 * bytes);
  int64_t done = 0;
  for (const Progress& progress : told) {
    EXPECT_LE(progress.done - done, int64_t{16} << 20);
    EXPECT_GE(progress.done, done);
    done = progress.done;
  }
}

}  // namespace
}  // namespace trireme::data
