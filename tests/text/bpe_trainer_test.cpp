// The laws of training: merges are those of Python's `tokenizers`, any number of threads learns the same, and
// what was learned encodes and decodes every text.
#include "trireme/text/bpe_trainer.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/data/scratch.h"
#include "tests/text/expected.h"
#include "trireme/base/error.h"
#include "trireme/text/load.h"

namespace trireme::text::testing {
namespace {

using nlohmann::json;
using Texts = std::vector<std::string>;

json learned_by_python() {
  std::ifstream file(fixtures() + "/learned.json");
  return json::parse(file);
}

std::vector<WordCount> words_of(const Texts& texts, int64_t threads = 1) {
  size_t next = 0;
  return count_words(
      [&]() -> std::optional<std::string> {
        return next < texts.size() ? std::optional(texts[next++]) : std::nullopt;
      },
      threads);
}

Texts python_texts() {
  return learned_by_python()["texts"].get<Texts>();
}

TEST(BpeTrainer, LearnsTheMergesOfPython) {
  const std::vector<WordCount> words = words_of(python_texts());
  const json learned = learned_by_python();
  for (const json& run : learned["runs"]) {
    const TrainedBpe trained =
        train_bpe(words, {.vocab_size = run["vocab_size"], .special = run["special"].get<Texts>()});
    ASSERT_EQ(trained.tokens, run["tokens"].get<Texts>());
    ASSERT_EQ(trained.merges.size(), run["merges"].size());
    for (size_t i = 0; i < trained.merges.size(); ++i) {
      const auto [left, right] = trained.merges[i];
      const std::pair merge(trained.tokens[static_cast<size_t>(left)],
                            trained.tokens[static_cast<size_t>(right)]);
      ASSERT_EQ(merge, (run["merges"][i].get<std::pair<std::string, std::string>>())) << i;
    }
  }
}

TEST(BpeTrainer, AnyNumberOfThreadsLearnsTheSame) {
  const Texts texts = python_texts();
  const auto learned_on = [&](int64_t threads) {
    return tokenizer_json(train_bpe(words_of(texts, threads), {.vocab_size = 900, .special = {"</s>"}}));
  };
  const std::string alone = learned_on(1);
  EXPECT_EQ(learned_on(2), alone);
  EXPECT_EQ(learned_on(5), alone);
}

TEST(BpeTrainer, WritesATokenizerThatGivesEveryTextBack) {
  const trireme::testing::Scratch scratch;
  const Texts texts = python_texts();
  const TrainedBpe trained =
      train_bpe(words_of(texts), {.vocab_size = 700, .special = {"<eos>", "a \"b\"\n"}});
  const Tokenizer tokenizer = load_tokenizer(scratch.write("tokenizer.json", tokenizer_json(trained)));
  EXPECT_EQ(tokenizer.vocab_size(), 700);
  EXPECT_EQ(end_token(tokenizer), 0);
  EXPECT_EQ(tokenizer.find_special("a \"b\"\n"), 1);
  size_t bytes = 0, tokens = 0;
  for (const std::string& text : texts) {
    const std::vector<int32_t> ids = tokenizer.encode(text);
    EXPECT_EQ(tokenizer.decode(ids, true), text);
    bytes += text.size();
    tokens += ids.size();
  }
  EXPECT_GT(bytes, 2 * tokens);
  EXPECT_EQ(static_cast<size_t>(trained.text_tokens), tokens);
  std::string unseen;
  for (uint32_t code = 1; code < 0x3000; code += 7) unseen += static_cast<char>(code % 127 + 1);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(unseen), true), unseen);
}

TEST(BpeTrainer, StopsWhereNoPairIsLeft) {
  const TrainedBpe trained = train_bpe(words_of({"aa aa"}), {.vocab_size = 1000});
  EXPECT_EQ(trained.tokens.size(), 258U);  // "aa" and " aa"
  EXPECT_EQ(trained.merges.size(), 2U);
  EXPECT_EQ(train_bpe({}, {.vocab_size = 256}).merges.size(), 0U);
}

TEST(BpeTrainer, RefusesAVocabularyWithoutRoom) {
  EXPECT_THROW(train_bpe({}, {.vocab_size = 255}), ConfigError);
  EXPECT_THROW(train_bpe({}, {.vocab_size = 257, .special = {"<a>", "<b>"}}), ConfigError);
  EXPECT_EQ(train_bpe({}, {.vocab_size = 257, .special = {"<a>", "<a>"}}).tokens.size(), 257U);
  EXPECT_THROW(train_bpe({}, {.vocab_size = int64_t{1} << 40}), ConfigError);
  EXPECT_THROW(train_bpe({}, {.special = {""}}), ConfigError);
  EXPECT_THROW(train_bpe({}, {.special = {"\xff"}}), ConfigError);
}

TEST(CountWords, AsGpt2CutsThem) {
  const std::vector<WordCount> expected = {{"\n", 1}, {" 12", 1}, {"'s", 1}, {"it", 2}};
  EXPECT_EQ(words_of({"it's 12\nit"}), expected);
}

TEST(CountWords, BytesThatAreNoTextCountAsEncodingReadsThem) {
  const std::vector<WordCount> expected = {{"a", 1}, {"\xef\xbf\xbd", 2}};
  EXPECT_EQ(words_of({"\xff", "a\x80", ""}), expected);
}

TEST(CountWords, AFailureOfTheSourceEndsAllThreads) {
  int left = 100;
  const auto next = [&]() -> std::optional<std::string> {
    if (--left == 0) throw DataError("gone");
    return "some words";
  };
  EXPECT_THROW(count_words(next, 3), DataError);
}

/// Any text, in parts of any size, has the words that it has as a whole.
TEST(CountWords, CutsChangeNoWord) {
  std::mt19937 random(7);
  const Texts parts = {" ",  "  ", "\n",       "\r\n",         "\t",           "a",    "It's",
                       "12", "!?", "\xc2\xa0", "\xe3\x80\x80", "\xe4\xb8\xad", "\x1c", "'"};
  for (int round = 0; round < 300; ++round) {
    std::string whole;
    while (whole.size() < 120) whole += parts[random() % parts.size()];
    whole += " end x";
    Texts pieces;
    std::string_view rest = whole;
    bool every_cut_is_between_words = true;
    while (rest.size() > 40) {
      const size_t cut = cut_between_words(rest, 40);
      ASSERT_GT(cut, 0U);
      ASSERT_LE(cut, 40U);
      every_cut_is_between_words &= rest[cut - 1] > ' ' && rest[cut - 1] < '\x7f' &&
                                    std::isspace(static_cast<unsigned char>(rest[cut])) != 0;
      pieces.emplace_back(rest.substr(0, cut));
      rest.remove_prefix(cut);
    }
    pieces.emplace_back(rest);
    if (every_cut_is_between_words) {
      ASSERT_EQ(words_of(pieces), words_of({whole})) << whole;
    }
  }
}

TEST(CountWords, ATextWithoutSpaceIsCutBetweenCharacters) {
  EXPECT_EQ(cut_between_words("\xe4\xb8\xad\xe4\xb8\xad\xe4\xb8\xad", 4), 3U);
  EXPECT_EQ(cut_between_words("\xe4\xb8\xad\xe4\xb8\xad", 2), 2U);
  EXPECT_EQ(cut_between_words("aaaaaaa", 3), 3U);
}

}  // namespace
}  // namespace trireme::text::testing
