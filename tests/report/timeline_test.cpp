#include "trireme/report/timeline.h"

#include <gtest/gtest.h>

#include <string>

namespace trireme::report {
namespace {

Timeline two_rows() {
  return {.title = "two rows",
          .kinds = {"forward", "a < b"},
          .rows = {{"one", {{0, 1, "F0", 0}, {1, 2, "F1", 0}, {3, 5, "B0", 1}}, "idle 1"},
                   {"second", {{1, 2, "F0", 0}, {2, 4, "B0", 1, 0.5}}, ""}}};
}

TEST(Timeline, DrawsBarsAsWideAsTheyLast) {
  EXPECT_EQ(draw_text(two_rows(), 80),
            "two rows\n"
            "one    F0 F1 ...B0      idle 1\n"
            "second ...F0 B0    ...\n");
}

TEST(Timeline, KeepsToTheWidthAndCutsLabels) {
  Timeline timeline = two_rows();
  timeline.rows[0].bars = {{0, 10, "F0", 0}, {10, 11, "longer", 0}};
  timeline.rows[1].bars = {};
  EXPECT_EQ(draw_text(timeline, 48),
            "two rows\n"
            "one    F0                            lon  idle 1\n"
            "second .................................\n");
}

TEST(Timeline, PutsNotesBelowRowsWhereTheyLeaveNoRoom) {
  Timeline timeline = two_rows();
  timeline.rows[0].note = "idle 1 of 5, which is a lot";
  EXPECT_EQ(draw_text(timeline, 40),
            "two rows\n"
            "one    F0 F1 ...B0\n"
            "       idle 1 of 5, which is a lot\n"
            "second ...F0 B0    ...\n");
}

TEST(Timeline, SaysWhyNothingHappens) {
  Timeline timeline = two_rows();
  timeline.causes = {"schedule", "imbalance", "communication", "host"};
  timeline.unit = "ms";
  timeline.rows[0].heading = "measured";
  timeline.rows[0].gaps = {{2, 2.5, "idle", 2}, {2.5, 3, "idle", 3}};
  EXPECT_EQ(draw_text(timeline, 80),
            "two rows\n"
            "idle: . schedule, ~ imbalance, - communication, ! host\n"
            "measured\n"
            "one    F0 F1 --!B0      idle 1\n"
            "second ...F0 B0    ...\n");
  const std::string svg = draw_svg(timeline);
  EXPECT_NE(svg.find("<title>idle: communication: 2 to 2.5 ms</title>"), std::string::npos) << svg;
  EXPECT_NE(svg.find(">measured</text>"), std::string::npos);
}

TEST(Timeline, OfNothingIsNoError) {
  EXPECT_EQ(draw_text({.title = "", .kinds = {}, .rows = {{"idle", {}, ""}}}, 40), "idle\n");
  EXPECT_NE(draw_svg({}).find("</svg>"), std::string::npos);
}

TEST(Timeline, SvgHoldsEveryBarAndEscapesText) {
  const std::string svg = draw_svg(two_rows());
  size_t bars = 0;
  for (size_t at = svg.find("<title>"); at != std::string::npos; at = svg.find("<title>", at + 1)) ++bars;
  EXPECT_EQ(bars, 5u);
  EXPECT_NE(svg.find("<title>a &lt; b B0: 3 to 5</title>"), std::string::npos) << svg;
  EXPECT_EQ(svg.find("a < b"), std::string::npos);
}

}  // namespace
}  // namespace trireme::report
