#include "tests/checkpoint/fuzz.h"

#include <gtest/gtest.h>

namespace trireme::checkpoint::testing {
namespace {

constexpr int64_t kExecutions = 100'000;

TEST(Fuzz, SafetensorsHeaders) {
  const FuzzCounts counts = fuzz(safetensors_target(), kExecutions, 1);
  EXPECT_GT(counts.taken, kExecutions / 100);  // it gets behind the first brace
  EXPECT_GT(counts.refused, kExecutions / 10);
}

TEST(Fuzz, Indexes) {
  const FuzzCounts counts = fuzz(index_target(), kExecutions, 2);
  EXPECT_GT(counts.taken, kExecutions / 100);
  EXPECT_GT(counts.refused, kExecutions / 10);
}

TEST(Fuzz, IndexesOfHuggingFace) {
  const FuzzCounts counts = fuzz(files_index_target(), kExecutions, 4);
  EXPECT_GT(counts.taken, kExecutions / 100);
  EXPECT_GT(counts.refused, kExecutions / 10);
}

/// A config is checked as text of ours, which takes a hundred times as long.
TEST(Fuzz, ConfigsOfHuggingFace) {
  const FuzzCounts counts = fuzz(model_config_target(), kExecutions / 100, 5);
  EXPECT_GT(counts.taken, kExecutions / 10'000);
  EXPECT_GT(counts.refused, kExecutions / 1000);
}

TEST(Fuzz, BoxesOfDcp) {
  const FuzzCounts counts = fuzz(boxes_target(), kExecutions, 6);
  EXPECT_GT(counts.taken, kExecutions / 100);
  EXPECT_GT(counts.refused, kExecutions / 10);
}

TEST(Fuzz, Commits) {
  const FuzzCounts counts = fuzz(commit_target(), kExecutions, 3);
  EXPECT_LT(counts.taken, kExecutions / 100);  // edits that undo each other
  EXPECT_GT(counts.refused, kExecutions / 10);
}

}  // namespace
}  // namespace trireme::checkpoint::testing
