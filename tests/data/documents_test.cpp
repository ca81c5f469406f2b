#include "trireme/data/documents.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace trireme::data {
namespace {

using Texts = std::vector<std::string_view>;

TEST(SplitDocuments, CutsAtSeparatorLinesOnly) {
  const struct {
    std::string_view text;
    Texts documents;
  } cases[] = {
      {"", {}},
      {"one", {"one"}},
      {"one\n<|endoftext|>\ntwo\n", {"one\n", "two\n"}},
      {"one\n<|endoftext|>\ntwo\n<|endoftext|>", {"one\n", "two\n"}},
      {"one\n<|endoftext|>\ntwo\n<|endoftext|>\n", {"one\n", "two\n"}},
      {"<|endoftext|>\none", {"one"}},
      {"<|endoftext|>\n<|endoftext|>\n", {}},
      {"one\n<|endoftext|>\n<|endoftext|>\ntwo", {"one\n", "two"}},
      {"one\r\n<|endoftext|>\r\ntwo", {"one\r\n", "two"}},
      {"in <|endoftext|> a line", {"in <|endoftext|> a line"}},
      {"a\n<|endoftext|> more\nb", {"a\n<|endoftext|> more\nb"}},
      {"a<|endoftext|>\nb\n<|endoftext|>\nc", {"a<|endoftext|>\nb\n", "c"}},
      {"\n\n<|endoftext|>\n\nb", {"\n\n", "\nb"}},
  };
  for (const auto& one : cases) EXPECT_EQ(split_documents(one.text), one.documents) << one.text;
}

TEST(HeldOutThreshold, IsTheFractionOfAllDraws) {
  EXPECT_EQ(held_out_threshold(0.0), 0u);
  EXPECT_EQ(held_out_threshold(0.5), uint64_t{1} << 63);
  EXPECT_EQ(held_out_threshold(0.25), uint64_t{1} << 62);
  EXPECT_EQ(held_out_threshold(std::nextafter(1.0, 0.0)), ~uint64_t{0} - 2047);  // 2^64 (1 - 2^-53)
}

TEST(HeldOutDraw, HoldsOutTheFractionOfManyDocuments) {
  constexpr int kDocuments = 20000;
  for (const double fraction : {0.01, 0.1, 0.5}) {
    int by_index = 0, by_name = 0;
    for (size_t i = 0; i < kDocuments; ++i) {
      by_index += held_out_draw("stories.txt", i) < held_out_threshold(fraction);
      by_name += held_out_draw("file-" + std::to_string(i), 0) < held_out_threshold(fraction);
    }
    const double five_sigma = 5.0 * std::sqrt(kDocuments * fraction * (1.0 - fraction));
    EXPECT_NEAR(by_index, kDocuments * fraction, five_sigma);
    EXPECT_NEAR(by_name, kDocuments * fraction, five_sigma);
  }
}

TEST(CutDocument, HoldsOutTheLastPartInTheRatio) {
  const std::string text = std::string(900, 'a') + std::string(100, 'b');
  EXPECT_EQ(cut_document(text, 0.1),
            std::pair(std::string_view(text).substr(0, 900), std::string_view(text).substr(900)));
  EXPECT_EQ(cut_document(text, 0.0).first, text);
  EXPECT_TRUE(cut_document(text, 0.0).second.empty());
}

TEST(Pieces, AreBoundedAndGiveTheDocumentBack) {
  std::string text;
  for (size_t line = 0; line < 60; ++line) text += std::string(line, 'x') + "\n";
  for (size_t limit = 1; limit < 90; ++limit) {
    std::string joined;
    for (const std::string_view piece : pieces(text, limit)) {
      EXPECT_LE(piece.size(), limit);
      EXPECT_FALSE(piece.empty());
      joined += piece;
    }
    EXPECT_EQ(joined, text) << limit;
  }
}

TEST(Pieces, EndAfterALineWhereThereIsOne) {
  EXPECT_EQ(pieces("ab\ncd\nefghijkl", 7), (Texts{"ab\ncd\n", "efghijk", "l"}));
  EXPECT_EQ(pieces("abc", 3), (Texts{"abc"}));
  EXPECT_EQ(pieces("", 3), (Texts{}));
}

}  // namespace
}  // namespace trireme::data
