#include "trireme/data/documents.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace trireme::data {
namespace {

using Texts = std::vector<std::string_view>;

Texts split_documents(std::string_view text) {
  Documents documents(text);
  Texts found;
  while (const auto document = documents.next()) found.push_back(*document);
  return found;
}

Texts pieces(std::string_view document, size_t limit) {
  Texts found;
  for_each_piece(document, limit, [&](std::string_view piece) { found.push_back(piece); });
  return found;
}

TEST(Documents, AreCutAtSeparatorLinesOnly) {
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

TEST(Documents, AreFoundAcrossTheWindowsOfTheSearch) {
  constexpr size_t kWindow = size_t{16} << 20;
  for (const size_t size : {kWindow - 7, kWindow - 1, kWindow, 2 * kWindow + 3}) {
    const std::string first = std::string(size, 'a') + "\n";
    int calls = 0;
    const std::string text = first + "<|endoftext|>\nlast";
    Documents documents(text, [&] { ++calls; });
    EXPECT_TRUE(documents.next() == first) << size;
    EXPECT_TRUE(documents.next() == "last") << size;
    EXPECT_FALSE(documents.next().has_value());
    EXPECT_GE(calls, static_cast<int>(size / kWindow));
  }
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
