#include "trireme/data/loader.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>
#include <numeric>
#include <thread>

#include "tests/data/scratch.h"
#include "tests/data/tokens.h"
#include "trireme/base/error.h"

namespace trireme::data {
namespace {

using testing::Scratch;

constexpr int64_t kSeqLen = 8;
constexpr int64_t kSamples = 40;

/// Token i is i, so that a sample tells its index: sample s starts with s * kSeqLen.
std::shared_ptr<const Dataset> counting_dataset(const Scratch& scratch, int64_t samples = kSamples) {
  std::vector<int32_t> tokens(static_cast<size_t>(samples * kSeqLen + 1));
  std::iota(tokens.begin(), tokens.end(), 0);
  testing::write_tokens(scratch.path(""), tokens, {65536, 16, 64});
  return std::make_shared<const Dataset>(scratch.path(""), "train", kSeqLen);
}

LoaderOptions loader_options_for(int64_t global_batch, int64_t micro_batch, int64_t dp_rank = 0,
                                 int64_t dp_size = 1) {
  return {.sampler = {.samples = kSamples, .seed = 5},
          .global_batch = global_batch,
          .micro_batch = micro_batch,
          .dp_rank = dp_rank,
          .dp_size = dp_size};
}

/// The samples of a batch; checks shapes and that targets are inputs shifted by one.
std::vector<int64_t> samples_of(const Batch& batch, int64_t micro_batch) {
  EXPECT_EQ(batch.inputs.sizes(), (at::IntArrayRef{micro_batch, kSeqLen}));
  EXPECT_EQ(batch.inputs.scalar_type(), at::kLong);
  EXPECT_TRUE(batch.inputs.is_contiguous() && batch.targets.is_contiguous());
  const at::Tensor first = batch.inputs.select(1, 0).clone();
  const at::Tensor offsets = at::arange(kSeqLen, at::kLong);
  EXPECT_TRUE(at::equal(batch.inputs, first.unsqueeze(1) + offsets));
  EXPECT_TRUE(at::equal(batch.targets, batch.inputs + 1));
  std::vector<int64_t> samples;
  for (int64_t row = 0; row < micro_batch; ++row) samples.push_back(first[row].item<int64_t>() / kSeqLen);
  return samples;
}

void append(std::vector<int64_t>& to, const std::vector<int64_t>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

TEST(Loader, NamesTheFirstTokenOutsideOfTheVocabulary) {
  const Scratch scratch;
  const auto dataset = counting_dataset(scratch);
  LoaderOptions options = loader_options_for(4, 2);
  options.vocab_size = kSamples * kSeqLen + 1;
  Loader all(dataset, options);
  for (int64_t batch = 0; batch < kSamples; ++batch) EXPECT_NO_THROW(all.next());
  options.vocab_size = kSamples * kSeqLen - 3;  // the last sample holds more
  Loader few(dataset, options);
  try {
    for (int64_t batch = 0; batch < kSamples; ++batch) few.next();
    ADD_FAILURE() << "nothing was said of a token outside";
  } catch (const DataError& error) {
    const std::string text = error.what();
    for (const char* part : {"token 317", "position 5", "sample 39", "vocabulary of 317", "318"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
    }
  }
}

TEST(Loader, FollowsTheSamplerForAnyRanksAndAccumulation) {
  const Scratch scratch;
  const auto dataset = counting_dataset(scratch);
  constexpr int64_t kGlobal = 12, kSteps = 8;  // 96 positions: more than two epochs
  for (const int64_t dp_size : {1, 2, 4}) {
    for (const int64_t accumulation : {1, 3}) {
      const int64_t micro = kGlobal / dp_size / accumulation;
      std::vector<std::unique_ptr<Loader>> loaders;
      for (int64_t rank = 0; rank < dp_size; ++rank) {
        loaders.push_back(
            std::make_unique<Loader>(dataset, loader_options_for(kGlobal, micro, rank, dp_size)));
      }
      std::vector<int64_t> seen;
      for (int64_t step = 0; step < kSteps; ++step) {
        for (const auto& loader : loaders) {
          for (int64_t pass = 0; pass < accumulation; ++pass) append(seen, samples_of(loader->next(), micro));
        }
      }
      EXPECT_EQ(seen, sample_indices({.samples = kSamples, .seed = 5}, 0, kSteps * kGlobal))
          << dp_size << " ranks, accumulation " << accumulation;
    }
  }
}

TEST(Loader, ContinuesFromACursorAsIfItHadNeverStopped) {
  const Scratch scratch;
  const auto dataset = counting_dataset(scratch);
  LoaderOptions options = loader_options_for(10, 5, 1, 2);
  Loader whole(dataset, options);
  for (int step = 0; step < 3; ++step) whole.next();
  options.cursor = 30;
  Loader resumed(dataset, options);
  for (int step = 0; step < 6; ++step) EXPECT_EQ(samples_of(resumed.next(), 5), samples_of(whole.next(), 5));
}

TEST(Loader, DoesNotShuffleForValidation) {
  const Scratch scratch;
  LoaderOptions options = loader_options_for(4, 4);
  options.sampler.shuffle = false;
  Loader loader(counting_dataset(scratch), options);
  EXPECT_EQ(samples_of(loader.next(), 4), (std::vector<int64_t>{0, 1, 2, 3}));
  EXPECT_EQ(samples_of(loader.next(), 4), (std::vector<int64_t>{4, 5, 6, 7}));
}

TEST(Loader, DeliversWhatIsReadyAndThenTheErrorOfItsThread) {
  const Scratch scratch;
  const auto dataset = counting_dataset(scratch);  // 321 tokens: shards of 64, chunks of 16
  const std::string path = scratch.path("train-00002.tokens");
  std::string content = testing::slurp(path);
  content[64] = static_cast<char>(~content[64]);  // token 128: samples 15 (its last token) and 16
  scratch.write("train-00002.tokens", content);
  LoaderOptions options = loader_options_for(1, 1);
  options.sampler.shuffle = false;
  options.prefetch = 3;
  Loader loader(std::make_shared<const Dataset>(scratch.path(""), "train", kSeqLen), options);
  for (int64_t sample = 0; sample < 15; ++sample) EXPECT_EQ(samples_of(loader.next(), 1)[0], sample);
  for (int attempt = 0; attempt < 2; ++attempt) {
    const std::string message = testing::message_of<DataError>([&] { loader.next(); });
    EXPECT_NE(message.find(path), std::string::npos) << message;
    EXPECT_NE(message.find("chunk 0 "), std::string::npos) << message;
  }
}

TEST(Loader, StopsWhetherItsQueueIsFullOrNot) {
  const Scratch scratch;
  const auto dataset = counting_dataset(scratch);
  for (int i = 0; i < 50; ++i) {
    Loader loader(dataset, loader_options_for(4, 2));
    if (i % 2 == 0) loader.next();
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

TEST(Loader, RefusesASplitShorterThanOneSequence) {
  const Scratch scratch;
  testing::write_tokens(scratch.path(""), std::vector<int32_t>(kSeqLen, 1), {256, 16, 64});
  const auto dataset = std::make_shared<const Dataset>(scratch.path(""), "train", kSeqLen);
  const std::string message =
      testing::message_of<DataError>([&] { Loader(dataset, loader_options_for(1, 1)); });
  EXPECT_NE(message.find("one sequence needs 9"), std::string::npos) << message;
}

TEST(Loader, RefusesBatchesThatDoNotDivide) {
  const Scratch scratch;
  const auto dataset = counting_dataset(scratch);
  EXPECT_THROW(Loader(dataset, loader_options_for(10, 4)), LogicError);
  EXPECT_THROW(Loader(dataset, loader_options_for(8, 3, 0, 2)), LogicError);
  EXPECT_THROW(Loader(dataset, loader_options_for(8, 4, 2, 2)), LogicError);
  EXPECT_THROW(Loader(dataset, loader_options_for(8, 0)), LogicError);
  LoaderOptions options = loader_options_for(8, 4);
  options.cursor = 4;
  EXPECT_THROW(Loader(dataset, options), LogicError);
  options = loader_options_for(8, 4);
  options.sampler.samples = kSamples + 1;
  EXPECT_THROW(Loader(dataset, options), LogicError);
  options = loader_options_for(8, 4);
  options.prefetch = 0;
  EXPECT_THROW(Loader(dataset, options), LogicError);
}

}  // namespace
}  // namespace trireme::data
