#include "trireme/data/encode_ahead.h"

#include <gtest/gtest.h>

#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/data/held_memory.h"
#include "trireme/base/error.h"

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
  const size_t count = 40;  // 50 MiB with their ids to come, of which 16 may wait
  for (size_t i = 0; i < count; ++i) encode.add(std::string(kBatch, 'a'), take());
  EXPECT_GE(lengths.size(), count - 16);
  encode.finish();
  EXPECT_EQ(lengths.size(), count);
}

/// Keeps its thread at texts with a 'w' until `waited` counts down; any other byte is an id.
class WaitingBytes final : public Tokenizer {
 public:
  WaitingBytes(std::latch& waited, std::atomic<size_t>& encoded) : waited_(waited), encoded_(encoded) {}
  std::string name() const override { return "waiting"; }
  std::string digest() const override { return "waiting"; }
  int64_t vocab_size() const override { return 256; }
  int32_t document_separator() const override { return 0; }
  std::optional<int32_t> end_token() const override { return std::nullopt; }
  bool is_special(int32_t) const override { return false; }
  std::string special_text(int32_t) const override { return {}; }
  std::optional<int32_t> unknown_token() const override { return std::nullopt; }
  bool cuts_anywhere() const override { return true; }
  std::unique_ptr<const Tokenizer> for_another_thread() const override {
    return std::make_unique<WaitingBytes>(waited_, encoded_);
  }
  std::vector<int32_t> encode(std::string_view text) const override {
    if (text.front() == 'w') waited_.wait();
    ++encoded_;
    return {text.begin(), text.end()};
  }
  std::string decode(std::span<const int32_t>) const override { return {}; }

 private:
  std::latch& waited_;
  std::atomic<size_t>& encoded_;  ///< texts
};

/// Heap beyond that before the first text when add() or finish() has to wait, as nothing is taken until then.
/// A second thread tokenises each text before the next one is added.
int64_t most_held(int64_t threads, size_t count, size_t text_bytes) {
  std::latch waited(1);
  std::atomic<size_t> encoded = 0;
  const WaitingBytes tokenizer(waited, encoded);
  int64_t before = 0, held = 0;
  size_t taken = 0;
  EncodeAhead encode(tokenizer, threads, [&] {
    if (waited.try_wait()) return;
    held = testing::heap_bytes() - before;
    waited.count_down();
  });
  const std::string text(text_bytes, 'a');
  before = testing::heap_bytes();
  encode.add(std::string(kBatch, 'w'), [&](std::span<const int32_t> ids) { taken += ids.size(); });
  for (size_t i = 0; i < count; ++i) {
    const std::array<size_t, 3> kept = {0, i, count};  // as much as others have to keep about a text
    encode.add(text, [&taken, kept](std::span<const int32_t> ids) { taken += kept[0] + ids.size(); });
    while (threads > 1 && encoded <= i) std::this_thread::yield();
  }
  encode.finish();
  EXPECT_EQ(taken, kBatch + count * text_bytes);
  return held;
}

constexpr int64_t kMiB = 1 << 20;

TEST(EncodeAheadMemory, IsBoundedHoweverShortTheTextsAre) {
  EXPECT_LT(most_held(/*threads=*/1, /*count=*/300'000, /*text_bytes=*/1), 18 * kMiB);
}

TEST(EncodeAheadMemory, CountsIdsAsWellAsText) {
  EXPECT_LT(most_held(/*threads=*/2, /*count=*/400, /*text_bytes=*/kBatch), 35 * kMiB);
}

/// After `allowed` threads no other can be started: there is no memory for a stack of the size they ask for.
class ThreadsRunOut final : public Tokenizer {
 public:
  ThreadsRunOut(const Tokenizer& tokenizer, int allowed) : tokenizer_(tokenizer), allowed_(allowed) {
    pthread_getattr_default_np(&usual_);
  }
  ~ThreadsRunOut() override {
    pthread_setattr_default_np(&usual_);
    pthread_attr_destroy(&usual_);
  }
  std::string name() const override { return tokenizer_.name(); }
  std::string digest() const override { return tokenizer_.digest(); }
  int64_t vocab_size() const override { return tokenizer_.vocab_size(); }
  int32_t document_separator() const override { return 0; }
  std::optional<int32_t> end_token() const override { return std::nullopt; }
  bool is_special(int32_t) const override { return false; }
  std::string special_text(int32_t) const override { return {}; }
  std::optional<int32_t> unknown_token() const override { return std::nullopt; }
  bool cuts_anywhere() const override { return false; }
  std::unique_ptr<const Tokenizer> for_another_thread() const override {
    if (allowed_-- == 0) {
      pthread_attr_t attributes;
      pthread_attr_init(&attributes);
      pthread_attr_setstacksize(&attributes, size_t{1} << 50);
      pthread_setattr_default_np(&attributes);
      pthread_attr_destroy(&attributes);
    }
    return tokenizer_.for_another_thread();
  }
  std::vector<int32_t> encode(std::string_view text) const override { return tokenizer_.encode(text); }
  std::string decode(std::span<const int32_t>) const override { return {}; }

 private:
  const Tokenizer& tokenizer_;
  mutable int allowed_;
  pthread_attr_t usual_;
};

TEST_F(EncodeAheadTest, GoesOnWithTheThreadsThatThereAre) {
  const ThreadsRunOut few(tokenizer, 2);
  ::testing::internal::CaptureStderr();
  EncodeAhead encode(few, 5, [] {});
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("2 of 5 threads could be started"), std::string::npos) << log;
  encode.add("one", take());
  encode.add("three", take());
  encode.finish();
  EXPECT_EQ(lengths, (std::vector<int32_t>{3, 5}));
}

TEST_F(EncodeAheadTest, IsRefusedWhereThereAreNoThreads) {
  const ThreadsRunOut none(tokenizer, 0);
  EXPECT_THROW(EncodeAhead(none, 5, [] {}), EnvironmentError);
}

}  // namespace
}  // namespace trireme::data
