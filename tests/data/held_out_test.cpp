#include "trireme/data/held_out.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "trireme/base/hash.h"

namespace trireme::data {
namespace {

/// Held-out bytes by document, documents being drawn as those of one file.
std::vector<int64_t> hold_out(const std::vector<int64_t>& sizes, double fraction, int64_t spare_bytes = 0) {
  const int64_t most = std::accumulate(sizes.begin(), sizes.end(), spare_bytes);
  HeldOutChooser chooser(fraction, most);
  for (size_t i = 0; i < sizes.size(); ++i) chooser.add(held_out_draw("text", i), sizes[i]);
  const HeldOut chosen = chooser.choose();
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const DrawnDocument document{.draw = held_out_draw("text", i), .ordinal = static_cast<int64_t>(i)};
    bytes.push_back(chosen.bytes_of(document, sizes[i]));
  }
  EXPECT_EQ(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}), chosen.bytes);
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
      const std::vector<int64_t> bytes = hold_out(sizes, fraction, /*spare_bytes=*/all / 10);
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
  HeldOutChooser chooser(0.5, 40);
  for (const uint64_t draw : {7, 3, 9, 1}) chooser.add(draw, 10);
  const HeldOut chosen = chooser.choose();
  EXPECT_EQ(chosen.bytes_of({1, 3}, 10), 10);
  EXPECT_EQ(chosen.bytes_of({3, 1}, 10), 10);
  EXPECT_EQ(chosen.bytes_of({7, 0}, 10), 0);
  EXPECT_EQ(chosen.bytes_of({9, 2}, 10), 0);
}

TEST(HeldOut, TellsDocumentsOfEqualDrawsApart) {
  HeldOutChooser chooser(0.5, 40);
  for (int i = 0; i < 4; ++i) chooser.add(5, 10);
  const HeldOut chosen = chooser.choose();
  for (int64_t i = 0; i < 4; ++i) EXPECT_EQ(chosen.bytes_of({5, i}, 10), i < 2 ? 10 : 0) << i;
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
