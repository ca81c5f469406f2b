#include "trireme/data/dataset.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <thread>

#include "tests/data/scratch.h"
#include "tests/data/tokens.h"
#include "trireme/base/error.h"
#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

using testing::Scratch;

/// Tokens that tell their place: i * 7 + 3 modulo the vocabulary.
std::vector<int32_t> numbered(int64_t count, int64_t vocab_size) {
  std::vector<int32_t> tokens;
  for (int64_t i = 0; i < count; ++i) tokens.push_back(static_cast<int32_t>((i * 7 + 3) % vocab_size));
  return tokens;
}

void flip_byte(const std::string& path, size_t position) {
  std::string content = testing::slurp(path);
  content[position] = static_cast<char>(content[position] ^ 0x5a);
  std::ofstream(path, std::ios::binary) << content;
}

TEST(Dataset, GivesPackedSamplesAcrossChunksAndShards) {
  for (const int64_t vocab : {256, 65536, 65537, 1000000}) {
    for (const SplitFormat& format :
         {SplitFormat{vocab, 4, 12}, SplitFormat{vocab, 5, 5}, SplitFormat{vocab, 64, 128}}) {
      for (const int64_t count : {2, 12, 61, 64}) {
        const Scratch scratch;
        const std::vector<int32_t> tokens = numbered(count, vocab);
        testing::write_tokens(scratch.path(""), tokens, format);
        for (const int64_t seq_len : {1, 3, 11, 30}) {
          const Dataset dataset(scratch.path(""), "train", seq_len);
          ASSERT_EQ(dataset.size(), (count - 1) / seq_len);
          ASSERT_EQ(dataset.tokens(), count);
          ASSERT_EQ(dataset.vocab_size(), vocab);
          std::vector<int64_t> sample(static_cast<size_t>(seq_len + 1));
          for (int64_t i = 0; i < dataset.size(); ++i) {
            dataset.read(i, sample);
            const auto begin = tokens.begin() + i * seq_len;
            ASSERT_EQ(sample, std::vector<int64_t>(begin, begin + seq_len + 1)) << vocab << " sample " << i;
          }
        }
      }
    }
  }
}

TEST(Dataset, WritesTheSameFilesHoweverTheTokensArrive) {
  const Scratch scratch;
  const std::vector<int32_t> tokens = numbered(500, 256);
  const SplitFormat format{256, 16, 64};
  std::filesystem::create_directory(scratch.path("whole"));
  std::filesystem::create_directory(scratch.path("parts"));
  testing::write_tokens(scratch.path("whole"), tokens, format);
  SplitWriter writer(scratch.path("parts"), "train", format);
  for (size_t begin = 0, size = 0; begin < tokens.size(); begin += size++) {
    writer.append(std::span(tokens).subspan(begin, std::min(size, tokens.size() - begin)));
  }
  const SplitEntry entry = writer.finish();
  ASSERT_EQ(entry.shards.size(), 8u);  // ceil(500 / 64)
  EXPECT_EQ(entry.tokens, 500);
  for (const ShardEntry& shard : entry.shards) {
    EXPECT_EQ(testing::slurp(scratch.path("parts/" + shard.file)),
              testing::slurp(scratch.path("whole/" + shard.file)));
  }
}

TEST(Dataset, LaysAShardOutAsDocumented) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), {1, 2, 300}, {65536, 2, 4});
  const std::string file = testing::slurp(scratch.path("train-00000.tokens"));
  const std::string tokens("\x01\x00\x02\x00\x2c\x01", 6);
  ASSERT_EQ(file.size(), 64u + 8u + 2u * 8u);  // header, 3 uint16 padded to 8, two chunks
  EXPECT_EQ(file.substr(0, 8), "TRITOKEN");
  EXPECT_EQ(file.substr(64, 8), tokens + std::string(2, '\0'));
  uint64_t checksums[2];
  std::memcpy(checksums, file.data() + 72, sizeof checksums);
  EXPECT_EQ(checksums[0], xxh3(tokens.data(), 4));
  EXPECT_EQ(checksums[1], xxh3(tokens.data() + 4, 2));
}

TEST(Dataset, HasNoSampleWhenTheTokensAreTooFew) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(8, 256), {256, 4, 8});
  EXPECT_EQ(Dataset(scratch.path(""), "train", 8).size(), 0);
  EXPECT_EQ(Dataset(scratch.path(""), "train", 7).size(), 1);
  EXPECT_EQ(Dataset(scratch.path(""), "val", 7).size(), 0);
}

TEST(Dataset, RefusesTokensOutsideTheVocabulary) {
  const Scratch scratch;
  for (const int64_t vocab : {200, 70000}) {
    SplitWriter writer(scratch.path(""), "train", {vocab, 4, 8});
    EXPECT_NO_THROW(writer.append(std::vector<int32_t>{0, static_cast<int32_t>(vocab - 1)}));
    for (const int32_t bad : {-1, static_cast<int32_t>(vocab), 1 << 30}) {
      const std::string message = testing::message_of<DataError>([&] {
        writer.append(std::vector<int32_t>{1, bad, 2});
      });
      EXPECT_NE(message.find(fmt::format("token {} ", bad)), std::string::npos) << message;
    }
  }
}

TEST(Dataset, NamesFileAndSizesOfATruncatedShardAtEveryLength) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(10, 256), {256, 4, 12});
  const std::string path = scratch.path("train-00000.tokens");
  const std::string whole = testing::slurp(path);
  for (size_t size = 0; size < whole.size(); ++size) {
    std::filesystem::resize_file(scratch.write("train-00000.tokens", whole), size);
    const std::string message =
        testing::message_of<DataError>([&] { Dataset(scratch.path(""), "train", 3); });
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_NE(message.find(fmt::format("expected {} bytes, found {}", whole.size(), size)),
              std::string::npos);
  }
  scratch.write("train-00000.tokens", whole + "x");
  EXPECT_THROW(Dataset(scratch.path(""), "train", 3), DataError);
  std::filesystem::remove(path);
  const std::string message = testing::message_of<DataError>([&] { Dataset(scratch.path(""), "train", 3); });
  EXPECT_NE(message.find(path), std::string::npos) << message;
}

TEST(Dataset, NoticesEveryFlippedByteOfAShard) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(12, 256), {256, 4, 12});  // 24 bytes of tokens: no padding
  const std::string path = scratch.path("train-00000.tokens");
  const std::string whole = testing::slurp(path);
  for (size_t position = 0; position < whole.size(); ++position) {
    scratch.write("train-00000.tokens", whole);
    flip_byte(path, position);
    EXPECT_THROW(testing::read_tokens(scratch.path(""), "train"), DataError) << "byte " << position;
  }
}

TEST(Dataset, NamesFileAndChunkOfACorruptedByteWhenItIsTouched) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(32, 256), {256, 4, 16});
  const std::string path = scratch.path("train-00001.tokens");
  flip_byte(path, 64 + 2 * 9);  // token 9 of the second shard: its chunk 2, token 25 of the split
  const Dataset dataset(scratch.path(""), "train", 3);
  std::vector<int64_t> sample(4);
  for (const int64_t intact : {0, 4, 5, 6}) EXPECT_NO_THROW(dataset.read(intact, sample)) << intact;
  const std::string message =
      testing::message_of<DataError>([&] { dataset.read(8, sample); });  // tokens 24 to 27
  EXPECT_NE(message.find(path), std::string::npos) << message;
  EXPECT_NE(message.find("chunk 2 "), std::string::npos) << message;
  for (const int64_t touched : {7, 8, 9}) EXPECT_THROW(dataset.read(touched, sample), DataError) << touched;
}

TEST(Dataset, NamesTheVersionOfAnotherFormat) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(8, 256), {256, 4, 8});
  std::string content = testing::slurp(scratch.path("train-00000.tokens"));
  content[8] = 9;
  scratch.write("train-00000.tokens", content);
  const std::string message = testing::message_of<DataError>([&] { Dataset(scratch.path(""), "train", 3); });
  EXPECT_NE(message.find("version 9"), std::string::npos) << message;
}

TEST(Dataset, RefusesAShardThatTheIndexDescribesDifferently) {
  const Scratch scratch;
  std::filesystem::create_directory(scratch.path("other"));
  testing::write_tokens(scratch.path(""), numbered(8, 256), {256, 4, 8});
  testing::write_tokens(scratch.path("other"), numbered(7, 256), {256, 4, 8});  // the same size after padding
  std::filesystem::copy_file(scratch.path("other/train-00000.tokens"), scratch.path("train-00000.tokens"),
                             std::filesystem::copy_options::overwrite_existing);
  const std::string message = testing::message_of<DataError>([&] { Dataset(scratch.path(""), "train", 3); });
  EXPECT_NE(message.find("7 tokens"), std::string::npos) << message;
  EXPECT_NE(message.find("8 tokens"), std::string::npos) << message;
}

/// A map of it would end the process (SIGBUS).
TEST(Dataset, AShardThatBecomesShorterIsNamed) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(64, 256), {256, 16, 64});
  const Dataset dataset(scratch.path(""), "train", 3);
  std::vector<int64_t> sample(4);
  dataset.read(0, sample);
  std::filesystem::resize_file(scratch.path("train-00000.tokens"), 100);
  dataset.read(1, sample);
  const std::string message = testing::message_of<DataError>([&] { dataset.read(19, sample); });
  EXPECT_NE(message.find("train-00000.tokens ends before byte"), std::string::npos) << message;
}

TEST(Dataset, RefusesUnknownSplitsAndIndicesOutside) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(10, 256), {256, 4, 8});
  EXPECT_THROW(Dataset(scratch.path(""), "test", 3), DataError);
  EXPECT_THROW(Dataset(scratch.path("nowhere"), "train", 3), DataError);
  const Dataset dataset(scratch.path(""), "train", 3);
  std::vector<int64_t> sample(4), shorter(3);
  EXPECT_THROW(dataset.read(-1, sample), LogicError);
  EXPECT_THROW(dataset.read(3, sample), LogicError);
  EXPECT_THROW(dataset.read(0, shorter), LogicError);
}

TEST(Dataset, IsReadByManyThreads) {
  const Scratch scratch;
  const std::vector<int32_t> tokens = numbered(4001, 65536);
  testing::write_tokens(scratch.path(""), tokens, {65536, 64, 1024});
  const Dataset dataset(scratch.path(""), "train", 10);
  std::atomic<int> wrong = 0;
  {
    std::vector<std::jthread> threads;
    for (int64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::vector<int64_t> sample(11);
        for (int64_t i = t; i < dataset.size(); i += 2) {
          dataset.read(i, sample);
          if (!std::equal(sample.begin(), sample.end(), tokens.begin() + i * 10)) ++wrong;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Dataset, NamesATokenOutsideTheVocabularyOfItsIndex) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), numbered(40, 256), {256, 64, 64});
  TokenIndex index = read_index(scratch.path(""));
  index.vocab_size = 200;  // as if another tokenizer had written the shards
  write_index(scratch.path(""), index);
  const Dataset dataset(scratch.path(""), "train", 9);
  std::vector<int64_t> sample(10);
  dataset.read(0, sample);  // 3, 10, ... 66
  const std::string message = testing::message_of<DataError>([&] { dataset.read(3, sample); });
  EXPECT_NE(message.find("token 206 of sample 3"), std::string::npos) << message;  // 7 * 29 + 3
  EXPECT_NE(message.find("vocabulary of 200"), std::string::npos) << message;
  EXPECT_NE(message.find(scratch.path("")), std::string::npos) << message;
}

}  // namespace
}  // namespace trireme::data
