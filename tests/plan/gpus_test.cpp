#include "trireme/plan/gpus.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

TEST(Gpus, HaveTheMemoryThatTheDriverLists) {
  EXPECT_EQ(gpu_bytes("h100"), int64_t{81559} << 20);
  EXPECT_EQ(gpu_bytes("h200"), int64_t{143771} << 20);
  EXPECT_EQ(gpu_bytes("80"), int64_t{80} << 30);
  EXPECT_EQ(gpu_bytes("0.5"), int64_t{1} << 29);
}

TEST(Gpus, ThatAreUnknownAreRefusedWithThoseThatAreNot) {
  for (const char* const kind : {"", "H100x", "0", "-3", "nan", "inf", "1e9", "80GiB", "h 100"}) {
    try {
      gpu_bytes(kind);
      ADD_FAILURE() << kind << " was taken";
    } catch (const ConfigError& error) {
      EXPECT_NE(std::string(error.what()).find("h200"), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace trireme::plan
