#include "trireme/plan/part.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "trireme/plan/flat_layout.h"
#include "trireme/plan/stages.h"

namespace trireme::plan {
namespace {

TEST(Part, AWholeParameterIsItsOwnPart) {
  const Part whole;
  EXPECT_TRUE(whole.is_whole());
  EXPECT_EQ(whole.whole_of({4, 6}), (Shape{4, 6}));
  EXPECT_EQ(whole.region({4, 6}, {2, 20}), Region::flat({4, 6}, {2, 20}));
  EXPECT_EQ(whole.first_element(), 0);
  EXPECT_EQ(whole.region({}, {0, 1}), Region::whole({}));
}

/// By the definition: coordinates in the box, then in the whole.
TEST(Part, ElementsOfABoxAreThoseOfTheWhole) {
  const Part box{.whole = {5, 8}, .start = {2, 3}};
  const Shape held = {2, 4};
  EXPECT_EQ(box.first_element(), 2 * 8 + 3);
  std::vector<int64_t> elements;
  const Region region = box.region(held, {1, 7});
  for (RunCursor cursor(box.whole_of(held), region); !cursor.done(); cursor.next()) {
    for (int64_t i = 0; i < cursor.run().length; ++i) elements.push_back(cursor.run().begin + i);
  }
  EXPECT_EQ(elements, (std::vector<int64_t>{20, 21, 22, 27, 28, 29}));
}

TEST(Part, ARangeWithoutElementsIsNoReasonToFail) {
  EXPECT_EQ(misfit(Part().region({4}, {9, 5}), {4}), "");
}

/// Whatever the ranks and shards, what is saved of a head that is spread covers its weight once, and one part
/// alone counts updates.
TEST(Part, TheSavedPartsOfASpreadHeadCoverTheModel) {
  for (const bool tied : {false, true}) {
    for (const int64_t ranks : {2, 3, 4}) {
      for (const int64_t shards : {1, 3}) {
        const ModelConfig model = complete({.family = ModelFamily::kLlama,
                                            .n_layers = 4,
                                            .d_model = 32,
                                            .n_heads = 4,
                                            .vocab_size = 259,
                                            .tie_embeddings = tied},
                                           64);
        const ModelFacts facts = describe(model, 64);
        StageSplit split = split_evenly(stage_parts(model, facts, /*spread_head=*/true), ranks);
        split.vocabulary = share_rows(model.vocab_size, ranks, model.d_model);
        std::map<std::string, std::vector<Region>> saved;
        std::map<std::string, int64_t> counts;
        for (int64_t stage = 0; stage < 2 * ranks; ++stage) {
          for (const UnitSpec& unit : stage_units(model, facts, units_of_stage(split, stage))) {
            const FlatLayout layout = flat_layout(unit, shards);
            for (const FlatEntry& entry : layout.entries()) {
              if (entry.part.copy > 0) continue;
              counts[entry.name] += entry.part.first_element() == 0 ? 1 : 0;
              for (int64_t shard = 0; shard < shards; ++shard)
                saved[entry.name].push_back(
                    entry.region(intersect(layout.shard(shard), {entry.offset, entry.end()})));
            }
          }
        }
        size_t params = 0;
        for (const UnitSpec& unit : facts.units) {
          for (const ParamSpec& param : unit.params) {
            ++params;
            std::vector<const Region*> regions;
            for (const Region& region : saved[param.name]) regions.push_back(&region);
            EXPECT_EQ(coverage_error(param.shape, regions), "") << param.name << " on " << ranks;
            EXPECT_EQ(counts[param.name], 1) << param.name;
          }
        }
        EXPECT_EQ(saved.size(), params);
      }
    }
  }
}

}  // namespace
}  // namespace trireme::plan
