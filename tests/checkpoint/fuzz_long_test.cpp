#include <gtest/gtest.h>

#include "tests/checkpoint/fuzz.h"

namespace trireme::checkpoint::testing {
namespace {

constexpr int64_t kExecutions = 10'000'000;

TEST(FuzzLong, SafetensorsHeaders) {
  fuzz(safetensors_target(), kExecutions, 11);
}

TEST(FuzzLong, Indexes) {
  fuzz(index_target(), kExecutions, 12);
}

}  // namespace
}  // namespace trireme::checkpoint::testing
