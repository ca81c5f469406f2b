// Groups of two are used again by later links, and end when it harms nobody.
#include "trireme/comm/pair_groups.h"

#include <gtest/gtest.h>

#include "trireme/comm/group.h"
#include "trireme/comm/world.h"

namespace trireme::comm {
namespace {

/// Groups of this rank alone: what they connect is all the same here.
std::shared_ptr<Group> group_of_one(const std::string& name) {
  return World::join_store({}, 0, 1, c10::kCPU, 1.0)->make_group(name, {0});
}

TEST(PairGroups, ALinkTakesTheFirstGroupThatIsFreeAtBothEnds) {
  PairGroups pairs;
  const auto a = group_of_one("a"), back = group_of_one("back"), b = group_of_one("b"),
             far = group_of_one("far");
  pairs.add("a", 0, 1, a);
  pairs.add("back", 1, 0, back);
  pairs.add("b", 0, 1, b);
  pairs.add("far", 0, 2, far);
  EXPECT_EQ(pairs.unused(0, 1), "") << "links use all of them";
  for (const auto& group : {a, back, b, far}) pairs.give_back(group, /*can_go_on=*/true);
  EXPECT_EQ(pairs.unused(0, 1), "a\nb");
  EXPECT_EQ(pairs.unused(1, 0), "back");
  EXPECT_EQ(pairs.unused(0, 2), "far");
  EXPECT_EQ(pairs.unused(2, 0), "");
  EXPECT_EQ(pairs.take("a\nb", "b"), b);
  EXPECT_EQ(pairs.unused(0, 1), "a");
  for (const char* none : {"", "b", "gone"}) EXPECT_EQ(pairs.take("a", none), nullptr) << none;
  EXPECT_EQ(pairs.take("gone", "gone"), nullptr);
  pairs.give_back(b, /*can_go_on=*/false);
  EXPECT_EQ(pairs.unused(0, 1), "a") << "a group of a link that failed is not used again";
  EXPECT_EQ(pairs.take("a\nb", "a\nb"), a);
}

TEST(PairGroups, EndTogetherUnlessOtherRanksAreLost) {
  for (const bool lost : {false, true}) {
    auto group = group_of_one("a");
    const std::weak_ptr<Group> there = group;
    {
      PairGroups pairs;
      pairs.add("a", 0, 1, std::move(group));
      if (lost) pairs.abandon();
      EXPECT_FALSE(there.expired());
    }
    EXPECT_EQ(there.expired(), !lost);
  }
}

}  // namespace
}  // namespace trireme::comm
