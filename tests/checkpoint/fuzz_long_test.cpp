#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/checkpoint/fuzz.h"

namespace trireme::checkpoint::testing {
namespace {

constexpr int64_t kExecutions = 10'000'000;

/// Minutes of a core.
class FuzzLong : public ::testing::Test {
 protected:
  void SetUp() override {
    if (std::getenv("TRIREME_LONG_TESTS") == nullptr)
      GTEST_SKIP() << "ten million executions take minutes; set TRIREME_LONG_TESTS=1 to run them";
  }
};

TEST_F(FuzzLong, SafetensorsHeaders) {
  fuzz(safetensors_target(), kExecutions, 11);
}

TEST_F(FuzzLong, Indexes) {
  fuzz(index_target(), kExecutions, 12);
}

TEST_F(FuzzLong, IndexesOfHuggingFace) {
  fuzz(files_index_target(), kExecutions, 13);
}

TEST_F(FuzzLong, ConfigsOfHuggingFace) {
  fuzz(model_config_target(), kExecutions / 100, 14);
}

TEST_F(FuzzLong, BoxesOfDcp) {
  fuzz(boxes_target(), kExecutions, 15);
}

}  // namespace
}  // namespace trireme::checkpoint::testing
