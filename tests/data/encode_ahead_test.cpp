#include "trireme/data/encode_ahead.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

namespace trireme::data {
namespace {

/// Gives the length of a text, after as long as the text asks for: each 's' is 50 ms, and 'x' is refused.
class SlowLength final : public Tokenizer {
 public:
  explicit SlowLength(std::shared_ptr<std::atomic<int>> begun) : begun_(std::move(begun)) {}
  std::string name() const override { return "length"; }
  std::string digest() const override { return "length"; }
  int64_t vocab_size() const override { return 1 << 30; }
  int32_t document_separator() const override { return 0; }
  std::optional<int32_t> end_token() const override { return std::nullopt; }
  bool is_special(int32_t) const override { return false; }
  std::string special_text(int32_t) const override { return {}; }
  std::optional<int32_t> unknown_token() const override { return std::nullopt; }
  bool cuts_anywhere() const override { return false; }
  std::unique_ptr<const Tokenizer> for_another_thread() const override {
    return std::make_unique<SlowLength>(begun_);
  }
  std::vector<int32_t> encode(std::string_view text) const override {
    ++*begun_;
    for (const char byte : text) {
      if (byte == 's') std::this_thread::sleep_for(std::chrono::milliseconds(50));
      if (byte == 'x') throw std::runtime_error("an x");
    }
    return {static_cast<int32_t>(text.size())};
  }
  std::string decode(std::span<const int32_t>) const override { return {}; }

 private:
  std::shared_ptr<std::atomic<int>> begun_;
};

struct EncodeAheadTest : ::testing::Test {
  std::shared_ptr<std::atomic<int>> begun = std::make_shared<std::atomic<int>>(0);
  SlowLength tokenizer{begun};
  std::vector<int32_t> lengths;
  EncodeAhead::Take take() {
    return [this](std::span<const int32_t> ids) { lengths.insert(lengths.end(), ids.begin(), ids.end()); };
  }
};

constexpr size_t kBatch = size_t{1} << 18;

std::string a_batch(std::string_view end) {
  std::string text(kBatch, 'a');
  text.append(end);
  return text;
}

TEST_F(EncodeAheadTest, GivesIdsInTheOrderOfTheTexts) {
  for (const int64_t threads : {1, 2, 5}) {
    lengths.clear();
    std::vector<int32_t> expected;
    EncodeAhead encode(tokenizer, threads, [] {});
    for (size_t i = 0; i < 60; ++i) {
      const std::string text = std::string(kBatch + i, 'a') + (i % 20 == 0 ? "s" : "");
      encode.add(text, take());
      encode.add("short", take());
      expected.push_back(static_cast<int32_t>(text.size()));
      expected.push_back(5);
    }
    encode.finish();
    EXPECT_EQ(lengths, expected) << threads;
  }
}

TEST_F(EncodeAheadTest, ShowsLifeWhileATextTakesLong) {
  int signs = 0;
  EncodeAhead encode(tokenizer, 1, [&] { ++signs; });
  encode.add("ssssssssss", take());
  encode.finish();
  EXPECT_GE(signs, 2);
  EXPECT_EQ(lengths, std::vector<int32_t>{10});
}

TEST_F(EncodeAheadTest, ThrowsWhatTheTokenizerThrew) {
  EncodeAhead encode(tokenizer, 3, [] {});
  encode.add(std::string(kBatch, 'a'), take());
  encode.add("x", take());
  EXPECT_THROW(encode.finish(), std::runtime_error);
  EXPECT_EQ(lengths, std::vector<int32_t>{static_cast<int32_t>(kBatch)}) << "what came before is taken";
}

TEST_F(EncodeAheadTest, GivenUpDropsWhatNobodyHasBegun) {
  struct GivenUp {};
  {
    EncodeAhead encode(tokenizer, 1, [] { throw GivenUp(); });
    for (int i = 0; i < 8; ++i) encode.add(a_batch("ssss"), take());
    EXPECT_THROW(encode.finish(), GivenUp);
  }
  EXPECT_LT(*begun, 8);
}

TEST_F(EncodeAheadTest, HoldsALimitedAmountOfText) {
  EncodeAhead encode(tokenizer, 1, [] {});
  const size_t count = 40;  // 10 MiB, of which 4 may wait
  for (size_t i = 0; i < count; ++i) encode.add(std::string(kBatch, 'a'), take());
  EXPECT_GE(lengths.size(), count - 16);
  encode.finish();
  EXPECT_EQ(lengths.size(), count);
}

}  // namespace
}  // namespace trireme::data
