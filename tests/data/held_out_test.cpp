#include "trireme/data/held_out.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "tests/data/held_memory.h"
#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

/// Held-out bytes by document, documents being drawn as those of one file.
std::vector<int64_t> hold_out(const std::vector<int64_t>& sizes, double fraction) {
  HeldOutChooser chooser(fraction);
  for (size_t i = 0; i < sizes.size(); ++i) chooser.add(held_out_draw("text", i), sizes[i]);
  HeldOut chosen = chooser.choose();
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < sizes.size(); ++i) bytes.push_back(chosen.take(held_out_draw("text", i), sizes[i]));
  return bytes;
}

/// Held-out bytes of documents of 10 bytes with these draws.
std::vector<int64_t> hold_out_drawn(const std::vector<uint64_t>& draws, double fraction) {
  HeldOutChooser chooser(fraction);
  for (const uint64_t draw : draws) chooser.add(draw, 10);
  HeldOut chosen = chooser.choose();
  std::vector<int64_t> bytes;
  for (const uint64_t draw : draws) bytes.push_back(chosen.take(draw, 10));
  return bytes;
}

std::vector<int64_t> various_sizes(size_t count) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < count; ++i) sizes.push_back(1 + static_cast<int64_t>(mix64(3, i) % 5000));
  return sizes;
}

TEST(HeldOut, IsTheShareToTheByteWhateverTheDocuments) {
  const std::vector<std::vector<int64_t>> corpora = {{1000}, {10, 400'000'000'000}, {400'000'000'000, 10},
                                                     {5, 5}, various_sizes(3),      various_sizes(2000)};
  for (const auto& sizes : corpora) {
    const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    for (const double fraction : {0.0, 1e-9, 0.01, 0.02, 0.3, 0.5, 0.999}) {
      const std::vector<int64_t> bytes = hold_out(sizes, fraction);
      EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}),
                std::llround(static_cast<double>(all) * fraction))
          << sizes.size() << " documents, " << fraction;
    }
  }
}

TEST(HeldOut, CutsOneDocumentAtMost) {
  const std::vector<int64_t> sizes = various_sizes(2000), bytes = hold_out(sizes, 0.1);
  int cut = 0, whole = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    whole += bytes[i] == sizes[i];
    cut += bytes[i] > 0 && bytes[i] < sizes[i];
  }
  EXPECT_LE(cut, 1);
  EXPECT_NEAR(whole, 200, 5 * std::sqrt(2000 * 0.1 * 0.9)) << "a tenth of documents that are drawn evenly";
}

TEST(HeldOut, TakesTheLowestDraws) {
  constexpr uint64_t kOne = uint64_t{1} << 60;
  EXPECT_EQ(hold_out_drawn({7 * kOne, 3 * kOne, 9 * kOne, kOne}, 0.5), (std::vector<int64_t>{0, 10, 0, 10}));
  EXPECT_EQ(hold_out_drawn({7 * kOne, 3 * kOne, 9 * kOne, kOne}, 0.6), (std::vector<int64_t>{4, 10, 0, 10}));
}

TEST(HeldOut, TakesEqualDrawsInSourceOrder) {
  EXPECT_EQ(hold_out_drawn({5, 5, 5, 5}, 0.5), (std::vector<int64_t>{10, 10, 0, 0}));
  EXPECT_EQ(hold_out_drawn({5, 5, 5, 5}, 0.6), (std::vector<int64_t>{10, 10, 4, 0}));
}

TEST(HeldOut, IsChosenInTheSameMemoryForAnyNumberOfDocuments) {
  HeldOutChooser chooser(0.5);
  const int64_t before = testing::heap_bytes();
  for (size_t i = 0; i < 1'000'000; ++i) chooser.add(held_out_draw("text", i), 100);
  EXPECT_LT(testing::heap_bytes() - before, 1 << 20);
}

TEST(HeldOutDraw, IsEvenOverIndicesAndNames) {
  constexpr int kDocuments = 20000;
  for (const double fraction : {0.01, 0.1, 0.5}) {
    const auto threshold = static_cast<uint64_t>(std::ldexp(fraction, 64));
    int by_index = 0, by_name = 0;
    for (size_t i = 0; i < kDocuments; ++i) {
      by_index += held_out_draw("stories.txt", i) < threshold;
      by_name += held_out_draw("file-" + std::to_string(i), 0) < threshold;
    }
    const double five_sigma = 5.0 * std::sqrt(kDocuments * fraction * (1.0 - fraction));
    EXPECT_NEAR(by_index, kDocuments * fraction, five_sigma);
    EXPECT_NEAR(by_name, kDocuments * fraction, five_sigma);
  }
}

}  // namespace
}  // namespace trireme::data
