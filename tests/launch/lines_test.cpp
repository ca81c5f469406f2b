#include "trireme/launch/lines.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace trireme::launch {
namespace {

using Lines = std::vector<std::string>;
using Returns = LineSplitter::Returns;

LineSink into(Lines& lines) {
  return [&lines](std::string_view line) { lines.emplace_back(line); };
}

/// The lines of `text` when it arrives in pieces of `piece` bytes.
Lines split_in_pieces(const std::string& text, size_t piece, Returns returns) {
  Lines lines;
  LineSplitter splitter(returns);
  for (size_t i = 0; i < text.size(); i += piece) {
    splitter.push(std::string_view(text).substr(i, piece), into(lines));
  }
  splitter.finish(into(lines));
  return lines;
}

TEST(WithoutEscapes, KeepsTheTextAlone) {
  const std::pair<const char*, const char*> lines[] = {
      {"plain", "plain"},
      {"\x1b[K12:00 warning", "12:00 warning"},
      {"\x1b[1;31mred\x1b[0m and \x1b[38;5;12mblue\x1b[m", "red and blue"},
      {"\x1b]0;a title\a>", ">"},
      {"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"},
      {"\x1b(B\x1b=ok", "ok"},
      {"cut off \x1b[3", "cut off "},
      {"alone \x1b", "alone "},
  };
  for (const auto& [line, plain] : lines) EXPECT_EQ(without_escapes(line), plain);
}

TEST(LineSplitter, FindsTheSameLinesHoweverTheBytesArrive) {
  const std::string text = "one\n\nthree\r\n10%\r50%\r\r100%\nlast";
  for (size_t piece = 1; piece <= text.size(); ++piece) {
    EXPECT_EQ(split_in_pieces(text, piece, Returns::kCollapse), (Lines{"one", "", "three", "100%", "last"}))
        << piece;
    EXPECT_EQ(split_in_pieces(text, piece, Returns::kKeep),
              (Lines{"one", "", "three\r", "10%\r50%\r\r100%", "last"}))
        << piece;
  }
}

TEST(LineSplitter, GivesNoLineForAnEmptyRest) {
  EXPECT_EQ(split_in_pieces("a\n", 1, Returns::kKeep), Lines{"a"});
}

TEST(LineSplitter, ABarThatNeverEndsIsOneLine) {
  std::string bar;
  for (int i = 0; i < 100'000; ++i) bar += "\rstep " + std::to_string(i);
  EXPECT_EQ(split_in_pieces(bar, 1000, Returns::kCollapse), Lines{"step 99999"});
}

TEST(LineSplitter, CutsALineThatWouldFillMemory) {
  const std::string text(LineSplitter::kMaxLine + 10'000, 'x');
  const Lines lines = split_in_pieces(text, 4096, Returns::kCollapse);
  ASSERT_EQ(lines.size(), 2U);
  EXPECT_EQ(lines[0] + lines[1], text);
}

TEST(LineMerger, ShowsALineOfSeveralRanksOnceWithTheirNumber) {
  Lines shown;
  LineMerger merger(0.2);
  for (int64_t rank : {2, 0, 3, 1}) merger.add(rank, "watch out", 0.1);
  merger.take_all(into(shown));
  EXPECT_EQ(shown, Lines{"watch out (x4 ranks)"});
}

TEST(LineMerger, NamesTheLowestRankWhenRankZeroIsNotAmongThem) {
  Lines shown;
  LineMerger merger(0.2);
  merger.add(3, "late", 0.0);
  merger.add(1, "late", 0.0);
  merger.add(2, "alone", 0.0);
  merger.take_all(into(shown));
  EXPECT_EQ(shown, (Lines{"[r1] late (x2 ranks)", "[r2] alone"}));
}

TEST(LineMerger, HoldsALineForTheWindowAndNoLonger) {
  Lines shown;
  LineMerger merger(0.2);
  EXPECT_FALSE(merger.next_due());
  merger.add(0, "a", 1.0);
  EXPECT_DOUBLE_EQ(*merger.next_due(), 1.2);
  merger.take_due(1.19, into(shown));
  EXPECT_EQ(shown, Lines{});
  merger.take_due(1.2, into(shown));
  merger.add(1, "a", 1.21);
  merger.take_all(into(shown));
  EXPECT_EQ(shown, (Lines{"a", "[r1] a"}));
}

TEST(LineMerger, DoesNotMergeWhatOneRankRepeats) {
  Lines shown;
  LineMerger merger(0.2);
  merger.add(1, "again", 0.0);
  merger.add(1, "again", 0.0);
  merger.add(2, "again", 0.0);
  merger.take_all(into(shown));
  EXPECT_EQ(shown, (Lines{"[r1] again (x2 ranks)", "[r1] again"}));
}

TEST(LineMerger, LooksThroughTimeStampsAndPrefixes) {
  Lines shown;
  LineMerger merger(0.2);
  merger.add(1, "08:15:03 [r1] warning: slow", 0.0);
  merger.add(2, "08:15:04 [r2] warning: slow", 0.0);
  merger.add(2, "08:15:04 [r1] not its own prefix", 0.0);
  merger.take_all(into(shown));
  EXPECT_EQ(shown,
            (Lines{"08:15:03 [r1] warning: slow (x2 ranks)", "[r2] 08:15:04 [r1] not its own prefix"}));
}

TEST(LineMerger, KeepsTheOrderOfFirstArrival) {
  Lines shown;
  LineMerger merger(0.2);
  const Lines order{"c", "a", "b"};
  for (int64_t rank : {0, 1}) {
    for (const std::string& line : order) merger.add(rank, line, 0.01 * static_cast<double>(rank));
  }
  merger.take_due(0.2, into(shown));
  EXPECT_EQ(shown, (Lines{"c (x2 ranks)", "a (x2 ranks)", "b (x2 ranks)"}));
}

TEST(LineMerger, ShowsWhatCameBeforeTheLastLineOfARank) {
  Lines shown;
  LineMerger merger(0.2);
  merger.add(0, "a", 0.0);
  merger.add(1, "b", 0.0);
  merger.add(2, "c", 0.0);
  merger.take_through(1, into(shown));
  EXPECT_EQ(shown, (Lines{"a", "[r1] b"}));
  merger.take_through(0, into(shown));
  EXPECT_EQ(shown, (Lines{"a", "[r1] b"})) << "none of rank 0 is held";
  merger.take_through(2, into(shown));
  EXPECT_EQ(shown, (Lines{"a", "[r1] b", "[r2] c"}));
}

TEST(LineMerger, DropsLinesThatNoneOfTheRanksWrote) {
  Lines shown;
  LineMerger merger(0.2);
  for (int64_t rank : {0, 1}) merger.add(rank, "shared", 0.0);
  merger.add(0, "a", 0.0);
  merger.add(2, "c", 0.0);
  merger.drop_others({1, 2});
  merger.take_all(into(shown));
  EXPECT_EQ(shown, (Lines{"shared (x2 ranks)", "[r2] c"}));
}

TEST(LineMerger, DoesNotHoldMoreThanItsLimit) {
  Lines shown;
  LineMerger merger(1e9);
  for (int i = 0; i < 10'000; ++i) {
    merger.add(0, std::to_string(i), 0.0);
    merger.take_due(0.0, into(shown));
  }
  EXPECT_GE(shown.size(), 9'000U);
  EXPECT_EQ(shown.front(), "0");
}

}  // namespace
}  // namespace trireme::launch
